"""The names that ``horovod.tensorflow.keras`` and ``horovod.keras`` have in common."""

from __future__ import annotations

from typing import Any

from horovod._keras import create_distributed_optimizer, flavours
from horovod._keras.distributed import backend
from horovod.common import ops
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
from horovod.common.compression import NoneCompressor
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

__all__ = [
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer step with gradients reduced over all ranks.

    It works in ``fit`` and ``train_on_batch``, eager or compiled, and in custom loops, where
    gradients of a DistributedGradientTape are taken as they are; if they are changed in between,
    they are reduced again, which is right with op=Average only. Clipping and loss scaling see
    reduced gradients, so that all ranks skip the same steps. All ranks must wrap and use optimizers
    alike.

    The object itself becomes distributed and is returned: what refers to it, such as a compiled
    model, trains distributed too. Only a ``tf.function`` of your own that was traced with it before
    goes on with plain steps, so wrap first. Its config and what is saved are those of the plain
    optimizer, so files open without horovod; `load_model` makes what it loads distributed again.

    Args:
        optimizer: any of Keras 3, on the TensorFlow or PyTorch backend, or of tf-keras, also legacy
            ones and LossScaleOptimizer.
        name: the optimizer's name from here on, and part of its calls' names; by default it keeps
            its own. Optimizers of one class in several traced functions of one name need it.
        device_dense: where TensorFlow reduces dense gradients; empty for its own choice.
        device_sparse: the same for IndexedSlices.
        compression: what is done to gradients for the way, see `Compression`.
        sparse_as_dense: makes IndexedSlices, as embeddings have, dense before they are reduced.
            Otherwise the rows of all ranks are gathered.
        gradient_predivide_factor: divides gradients by this before they are summed and multiplies
            after, to keep them in range; with op=Average only.
        op: Average or Sum.
        backward_passes_per_step: passes whose gradients add up, undivided, before they are reduced
            and applied; ``iterations`` counts steps, not passes. Saved files have no part of a sum.
        average_aggregated_gradients: divides that sum by the number of passes.
        num_groups: deprecated, see `groups`.
        groups: gradients that travel together: how many groups to make of all of them, or a list
            with the variables of each.
        process_set: the ranks that reduce; elsewhere the optimizer stays local.
        scale_local_gradients: divides gradients of local variables by the number of ranks, so that
            they are those of the mean loss, too.

    Returns:
        `optimizer`, with ``register_local_var`` and what Keras 2 scripts use, such as ``lr``.

    Raises:
        ValueError: an argument is wrong; it isn't a Keras optimizer, or distributed already; a
            ``tf.distribute`` strategy with several replicas is active; or init() wasn't called.
        NotImplementedError: Keras 3 runs on a backend that there is no front end for.
    """
    return create_distributed_optimizer(
        None,
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups,
        process_set,
        scale_local_gradients,
        num_groups=num_groups,
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedOptimizer`, with layers that each rank has for itself.

    Args:
        optimizer: see `DistributedOptimizer`, as for all others.
        name: see there.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        gradient_predivide_factor: see there.
        op: see there.
        backward_passes_per_step: see there.
        average_aggregated_gradients: see there.
        groups: see there.
        process_set: see there.
        local_layers: a layer or a list of layers, built, whose gradients are never reduced.
        scale_local_gradients: see there.

    Returns:
        `optimizer`.

    Raises:
        ValueError: a layer is none, or hasn't been built; and see `DistributedOptimizer`.
    """
    several = isinstance(local_layers, (list, tuple))
    layers = [] if local_layers is None else local_layers if several else [local_layers]
    for layer in layers:
        if not flavours.is_layer(layer):
            raise ValueError(f"local_layers must be Keras layers; {layer!r} is none")
        if not layer.built:
            raise ValueError(f"local layer {layer.name} has no weights before it is built")
    distributed = create_distributed_optimizer(
        None,
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in [weight for layer in layers for weight in layer.trainable_weights]:
        distributed.register_local_var(variable)
    return distributed


# ---------------------------------------------------------------------------------------------
# Values


def _tensors() -> Any:
    return backend(flavours.active_backend())


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = NoneCompressor,
) -> Any:
    """Reduces a value over all ranks; blocks until all have called it.

    Args:
        value: anything that a tensor can be made of, of the same shape and type on all ranks.
        name: matches the calls of the ranks; by default the order of calls does.
        average: deprecated, see `op`.
        prescale_factor: multiplies each rank's value.
        postscale_factor: multiplies the result.
        op: how; Average by default.
        compression: what is done for the way, see `Compression`.

    Returns:
        A tensor of the backend.
    """
    chosen = ops.reduce_op(op, average)
    return _tensors().allreduce(
        value,
        name,
        chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenates the values of all ranks along the first dimension; blocks until all call it.

    Args:
        value: anything that a tensor with a dimension can be made of.
        name: see `allreduce`.

    Returns:
        A tensor of the backend.
    """
    return _tensors().allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Gives all ranks the value of one; blocks until all have called it.

    Args:
        value: anything that a tensor can be made of, of the same shape and type on all ranks.
        root_rank: global rank of the one whose value counts.
        name: see `allreduce`.

    Returns:
        A tensor of the backend.
    """
    return _tensors().broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces a value and gives each rank its part of the rows; blocks until all have called it.

    Args:
        value: anything that a tensor with a dimension can be made of.
        name: see `allreduce`.
        op: Average or Sum.

    Returns:
        A tensor of the backend.
    """
    return _tensors().reducescatter(value, name, ops.reduce_op(op, None))


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that gives all global variables of a TF1 graph the values of one rank.

    Args:
        root_rank: global rank of the one whose values count.

    Raises:
        RuntimeError: outside of such a graph: there is BroadcastGlobalVariablesCallback, or
            ``horovod.tensorflow.broadcast_variables``.
    """
    return _tensors().broadcast_global_variables(root_rank)
