"""The operations under the older name that scripts import; must not do any work itself."""

from typing import Any as _Any

from horovod.common.basics import (  # noqa: F401
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
from horovod.common.ops import (  # noqa: F401
    reduce_op as handle_average_backwards_compatibility,
)
from horovod.common.process_sets import (  # noqa: F401
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.common.util import _basics, num_rank_is_power_2  # noqa: F401
from horovod.tensorflow.collectives import (  # noqa: F401
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
from horovod.tensorflow.gradients import of_alltoall as _alltoall_grad  # noqa: F401
from horovod.tensorflow.util import (  # noqa: F401
    check_num_rank_power_of_2,
    gpu_available,
)
from horovod.tensorflow.util import gpu_available as _check_has_gpu  # noqa: F401


def _allreduce(
    tensor: _Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _Any:
    """`allreduce` in the order of arguments, and with the operation, of the bare operator."""
    return allreduce(
        tensor,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )
