"""The public names for TensorFlow and Keras, and the signatures that Horovod 0.28 programs use.

``G`` stands for ``global_process_set``, ``C`` for ``Compression.none``, ``A`` for ``Average``.
Written from the compatibility text; a default may not change, an argument may not move.
What follows ``*`` is ours.
"""

from __future__ import annotations

DEVICES = "device_dense='', device_sparse='', compression=C"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
TAPE = (
    f"gradtape, {DEVICES}, sparse_as_dense=False, op=A, gradient_predivide_factor=1.0, "
    "num_groups=0, groups=None, process_set=G, {}scale_local_gradients=True"
)
AGGREGATION = "backward_passes_per_step=1, average_aggregated_gradients=False"

QUERIES = """
    shutdown is_initialized stop_timeline size local_size cross_size rank local_rank cross_rank
    is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built
    ddl_built ccl_built cuda_built rocm_built
"""
BASICS = {
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    **dict.fromkeys(QUERIES.split(), ""),
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}
CONSTANTS = ["Average", "Sum", "Adasum", "Min", "Max", "Product"]

TENSORFLOW = {
    **BASICS,
    "allreduce": f"tensor, average=None, {DEVICES}, op=None, {SCALES}, name=None, process_set=G, "
    "ignore_name_scope=False",
    "grouped_allreduce": f"tensors, average=None, {DEVICES}, op=None, {SCALES}, process_set=G, "
    "ignore_name_scope=False, name=None",
    "reducescatter": "tensor, device_dense='', compression=C, op=A, name=None, process_set=G, "
    f"ignore_name_scope=False, {SCALES}",
    "grouped_reducescatter": "tensors, device_dense='', compression=C, op=A, process_set=G, "
    + SCALES,
    "allgather": "tensor, name=None, ignore_name_scope=False, process_set=G",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set=G",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set=G",
    "broadcast_": "variables, root_rank, name=None, process_set=G",
    "broadcast_variables": "variables, root_rank, process_set=G, inplace=False",
    "broadcast_global_variables": "root_rank",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set=G",
    "join": "",
    "barrier": "process_set=G",
    "size_op": "process_set_id=0, name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, process_set=G",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=G",
    "allgather_object": "obj, session=None, name=None, process_set=G",
    "SyncBatchNormalization": "fused=False, **kwargs",
    "DistributedGradientTape": TAPE.format(""),
    "PartialDistributedGradientTape": TAPE.format("local_layers=None, "),
    "DistributedOptimizer": f"optimizer, name=None, use_locking=False, {DEVICES}, "
    "sparse_as_dense=False, backward_passes_per_step=1, op=A, gradient_predivide_factor=1.0, "
    "average_aggregated_gradients=False, num_groups=0, groups=None, process_set=G, "
    "scale_local_gradients=True",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "LocalGradientAggregationHelper": "backward_passes_per_step, allreduce_func, sparse_as_dense, "
    "average_aggregated_gradients, rank, optimizer_type, process_set=G, "
    "scale_local_gradients=True, name=''",
}
TENSORFLOW_OTHERS = [
    *CONSTANTS,
    "ProcessSet",
    "global_process_set",
    "Compression",
    "HorovodInternalError",
    "handle_average_backwards_compatibility",
]

KERAS = {
    **BASICS,
    "DistributedOptimizer": f"optimizer, name=None, {DEVICES}, sparse_as_dense=False, "
    f"gradient_predivide_factor=1.0, op=A, {AGGREGATION}, num_groups=0, groups=None, "
    "process_set=G, scale_local_gradients=True",
    "PartialDistributedOptimizer": f"optimizer, name=None, {DEVICES}, sparse_as_dense=False, "
    f"gradient_predivide_factor=1.0, op=A, {AGGREGATION}, groups=None, process_set=G, "
    "local_layers=None, scale_local_gradients=True",
    "broadcast_global_variables": "root_rank",
    "allreduce": f"value, name=None, average=None, {SCALES}, op=None, compression=C",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=A",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=C, "
    "legacy_opts=False",
}
KERAS_OTHERS = [*CONSTANTS, "ProcessSet", "global_process_set", "Compression", "callbacks"]

CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, end_epoch=None, "
    "staircase=True, momentum_correction=True, steps_per_epoch=None",
    "LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True, "
    "steps_per_epoch=None, verbose=0",
    "BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', "
    "save_freq='epoch'",
}

# Of each module: signatures, and names that have none. Both together are its ``__all__``.
SURFACES = {
    "horovod.tensorflow": (TENSORFLOW, TENSORFLOW_OTHERS),
    "horovod.tensorflow.keras": (KERAS, KERAS_OTHERS),
    "horovod.keras": (KERAS, KERAS_OTHERS),
    "horovod.tensorflow.keras.callbacks": (CALLBACKS, []),
    "horovod.keras.callbacks": (CALLBACKS, []),
}

# What else programs find: names that aren't in an ``__all__``, and other modules.
MODULES = {
    "horovod.tensorflow": """
        check_num_rank_power_of_2 _executing_eagerly _make_subgraph _cache vars_to_refs
        refs_to_vars gpu_available split_list _DistributedOptimizer _allreduce_cond _check_has_gpu
        mpi_ops
    """,
    "horovod.tensorflow.mpi_ops": """
        _basics _allreduce _alltoall_grad _check_has_gpu allreduce grouped_allreduce allgather
        broadcast broadcast_ alltoall reducescatter join size_op rank_op
    """,
    "horovod.tensorflow.functions": """
        broadcast_variables broadcast_global_variables broadcast_object broadcast_object_fn
        allgather_object
    """,
    "horovod.tensorflow.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "horovod.tensorflow.gradient_aggregation": "LocalGradientAggregationHelper",
    "horovod.tensorflow.gradient_aggregation_eager": "LocalGradientAggregationHelperEager",
    "horovod.tensorflow.util": "_executing_eagerly _cache vars_to_refs refs_to_vars",
    "horovod._keras": "create_distributed_optimizer CallableList",
    "horovod._keras.callbacks": " ".join(f"{name}Impl" for name in CALLBACKS),
}

# What 0.28 has and we have not: each is really missing, so this list can only shrink.
NOT_YET = {
    "horovod.tensorflow.elastic": "elastic training",
    "horovod.tensorflow.keras.elastic": "elastic training",
    "horovod.keras.elastic": "elastic training",
    "horovod._keras.elastic": "elastic training",
    "horovod.tensorflow.data": "the service for tf.data",
    "horovod.tensorflow.mpi_ops.mpi_lib": "the C symbols of the native library",
}
