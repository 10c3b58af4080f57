"""``import horovod.tensorflow as hvd``: all that a training script uses; does no work itself."""

try:
    import tensorflow as _tf  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"horovod.tensorflow needs TensorFlow, which can't be imported ({error}). Install it with "
        f"`pip install tensorflow`, or together with horovod from its sources: "
        f"`pip install '.[tensorflow]'`"
    ) from error

import importlib as _importlib
import typing as _typing

from horovod.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import reduce_op as handle_average_backwards_compatibility
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.tensorflow import gradients as _gradients  # noqa: F401  registers them
from horovod.tensorflow import mpi_ops as mpi_ops  # programs reach it through this module
from horovod.tensorflow.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.hook import BroadcastGlobalVariablesHook
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.optimizer import _DistributedOptimizer as _DistributedOptimizer
from horovod.tensorflow.reduction import allreduce_cond as _allreduce_cond  # noqa: F401
from horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from horovod.tensorflow.util import (  # noqa: F401  not for `import *`, but programs know them
    _cache,
    _executing_eagerly,
    _make_subgraph,
    check_num_rank_power_of_2,
    gpu_available,
    refs_to_vars,
    split_list,
    vars_to_refs,
)
from horovod.tensorflow.util import gpu_available as _check_has_gpu  # noqa: F401

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> _typing.Any:
    """Imports what needs Keras, or is seldom wanted, when it is first asked for."""
    if name == "SyncBatchNormalization":
        return _importlib.import_module(f"{__name__}.sync_batch_norm").SyncBatchNormalization
    if name in ("gradient_aggregation_eager", "keras", "sync_batch_norm"):
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
