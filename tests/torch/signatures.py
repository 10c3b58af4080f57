"""The public names of the library, and the signatures that Horovod 0.28 programs use.

``G`` stands for ``global_process_set``, ``C`` for ``Compression.none``, ``A`` for ``Average``.
Written from the compatibility text; a default may not change, an argument may not move.
What follows ``*`` is ours.
"""

from __future__ import annotations

REDUCE = (
    "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=G"
)
REDUCE_SYNC = REDUCE.replace("op=None", "compression=C, op=None")
SCATTER = "name=None, op=A, process_set=G, prescale_factor=1.0, postscale_factor=1.0"
SCATTER_SYNC = SCATTER.replace("op=A", "compression=C, op=A")
GATHER = "name=None, process_set=G"
BROADCAST = "tensor, root_rank, name=None, process_set=G"

QUERIES = """
    rank size local_rank local_size cross_rank cross_size mpi_threads_supported
    mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
    rocm_built
"""

SIGNATURES = {
    "allreduce": f"tensor, {REDUCE_SYNC}",
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce_": f"tensor, {REDUCE}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "grouped_allreduce": f"tensors, {REDUCE_SYNC}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "allgather": f"tensor, {GATHER}",
    "allgather_async": f"tensor, {GATHER}",
    "grouped_allgather": f"tensors, {GATHER}",
    "grouped_allgather_async": f"tensors, {GATHER}",
    "broadcast": BROADCAST,
    "broadcast_async": BROADCAST,
    "broadcast_": BROADCAST,
    "broadcast_async_": BROADCAST,
    "alltoall": "tensor, splits=None, name=None, process_set=G",
    "alltoall_async": "tensor, splits=None, name=None, process_set=G",
    "reducescatter": f"tensor, {SCATTER_SYNC}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {SCATTER_SYNC}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "sparse_allreduce": "tensor, name=None, op=None, process_set=G",
    "sparse_allreduce_async": "tensor, name, op, process_set=G",
    "join": "device=-1",
    "barrier": "process_set=G",
    "poll": "handle",
    "synchronize": "handle",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=C, "
    "backward_passes_per_step=1, op=A, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
    "sparse_as_dense=False, process_set=G, "
    "*, skip_unused_parameters=False",
    "overlap": "model, optimizer",
    "broadcast_parameters": "params, root_rank, *, process_set=G",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None, *, process_set=G",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=G",
    "allgather_object": "obj, name=None, *, process_set=G",
    "metric_average": "metrics, weight=1, process_set=G, name=None",
    "shard_dataset": "dataset, shuffle=False, seed=0, process_set=G",
    "scatter_dataset": "dataset, root_rank=0, shuffle=False, seed=0, process_set=G",
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    **dict.fromkeys(QUERIES.split(), ""),
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "_check_has_gpu": "",
}

OTHERS = {
    "Average": 0,
    "Sum": 1,
    "Adasum": 2,
    "Min": 3,
    "Max": 4,
    "Product": 5,
    "ProcessSet": None,
    "global_process_set": None,
    "Checkpointer": None,
    "Compression": None,
    "SyncBatchNorm": None,
    "HorovodInternalError": None,
}

# Every other module that programs import, and what they find there.
MODULES = {
    "horovod": "__version__ run",
    "horovod.torch.mpi_ops": """
        is_homogeneous handle_average_backwards_compatibility _basics _handle_map gpu_available
        num_rank_is_power_2
    """,
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.functions": """
        broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object
    """,
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.common.exceptions": """
        HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError
        get_version_mismatch_message
    """,
    "horovod.common.util": """
        EXTENSIONS get_ext_suffix get_extension_full_path check_extension extension_available
        gpu_available mpi_built gloo_built nccl_built ddl_built ccl_built _cache env
        get_average_backwards_compatibility_fun num_rank_is_power_2 is_iterable
        is_version_greater_equal_than
    """,
    "horovod.data": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.runner": "run",
    "horovod.runner.launch": "run_commandline",
}

# What of SIGNATURES `horovod.torch.mpi_ops` doesn't have.
ELSEWHERE = """
    DistributedOptimizer broadcast_parameters broadcast_optimizer_state broadcast_object
    allgather_object metric_average overlap shard_dataset scatter_dataset _check_has_gpu
"""

# What of the object ``horovod.torch.mpi_ops._basics`` is asked for.
BASICS = "_get_process_set_ids_and_ranks Average Sum Adasum Min Max Product init rank size shutdown"

# What 0.28 has and we have not: each is really missing, so this list can only shrink.
NOT_YET = {
    "horovod.torch.elastic": "elastic training",
    "horovod.common.elastic": "elastic training",
    "horovod.torch.mpi_ops.mpi_lib": "the C symbols of the native library",
}
