"""The collectives as scripts call them, eager or traced; must not know how they travel.

Eagerly a call blocks until it is done. In a ``tf.function`` it holds no thread, and independent
calls run in any order on any rank. All of them are differentiable.

Errors of any call come as TensorFlow's own: ``InvalidArgumentError`` for what is wrong with this
rank's call, ``FailedPreconditionError`` if ranks disagree or ``init()`` was not called, and
``UnknownError`` when a peer is lost or the engine has ended. What is wrong before there is a tensor
is a ``ValueError`` or ``TypeError``; then the matching calls of the other ranks fail too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from horovod.common import ops
from horovod.common.ops import ReduceOp, reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set, uid_of
from horovod.tensorflow import calls, names
from horovod.tensorflow.calls import Call
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.internals import traced_function, unconverted
from horovod.tensorflow.native import operators
from horovod.tensorflow.rows import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    Arguments,
    Row,
    Tensors,
    ranks_of,
)

Average, Sum, Adasum, Min, Max, Product = ReduceOp


def _named(name: str | None, ignore_name_scope: bool) -> str | None:
    """The user's name, within the scope of the graph of TensorFlow 1 that is being built.

    In traced functions scopes depend on what else was traced, so they are no part of names.
    """
    if name is None or ignore_name_scope or tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope()
    return f"{scope}/{name}" if scope and not traced_function(graph).building_function else name


def _on(device: str) -> AbstractContextManager[Any]:
    """The scope of a device; an empty name leaves that of the user's, which None would undo."""
    return tf.device(device) if device else nullcontext()


# ---- Reductions ---------------------------------------------------------------------------------


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over the ranks of a process set; all of them must call it.

    Args:
        tensor: a tensor, variable or what converts to one, of the same shape and type on every
            rank; or ``tf.IndexedSlices``, whose rows are gathered.
        average: deprecated; True is ``op=Average``, False ``op=Sum``.
        device_dense: where a tensor is compressed; empty leaves it to TensorFlow.
        device_sparse: the same for ``IndexedSlices``.
        compression: what the tensor becomes for the way; ``IndexedSlices`` travel as they are.
        op: Average (the default), Sum, Adasum, Min, Max or Product; Average or Sum for
            ``IndexedSlices``.
        prescale_factor: multiplies each rank's term.
        postscale_factor: multiplies the result.
        name: the same on every rank, and of one call at a time; None for a number.
        process_set: who takes part.
        ignore_name_scope: leaves the name scope out of `name` in graphs of TensorFlow 1, the only
            ones that it is put into.

    Returns:
        What came in, reduced: of the same shape and type, or ``IndexedSlices`` with all rows and
        the ``dense_shape`` of the input.

    Raises:
        ValueError: `op` and `average` are both given, or the set isn't registered.
        NotImplementedError: ``IndexedSlices`` with another `op`, or with scale factors.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "allreduce")
    key = _named(name, ignore_name_scope)
    if isinstance(tensor, tf.IndexedSlices):
        with Call(ALLGATHER, key, number, grouped=True) as call, _on(device_sparse):
            scaled = Arguments(reduce_op(op, average), prescale_factor, postscale_factor)
            return _reduce_slices(call, [tensor], scaled, number)[0]
    with Call(ALLREDUCE, key, number) as call, _on(device_dense):
        scaled = Arguments(reduce_op(op, average), prescale_factor, postscale_factor)
        return call.run([tensor], scaled, compression)[0]


@unconverted
def grouped_allreduce(
    tensors: Iterable[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces several tensors, of any types, as one; otherwise like `allreduce`.

    Args:
        tensors: as many on every rank, in the same order; ``IndexedSlices`` among them are gathered
            together.
        average: see `allreduce`, like all below.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        op: see there.
        prescale_factor: see there.
        postscale_factor: see there.
        process_set: see there.
        ignore_name_scope: see there.
        name: see there.

    Returns:
        The results in the order of `tensors`; nothing is sent for an empty list.

    Raises:
        ValueError: see `allreduce`.
        NotImplementedError: see there.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "grouped_allreduce")
    key = _named(name, ignore_name_scope)
    results = _listed(ALLREDUCE, tensors, key, number)
    sparse = [i for i, tensor in enumerate(results) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(results)) if i not in set(sparse)]
    if sparse:
        with Call(ALLGATHER, key, number, grouped=True) as call, _on(device_sparse):
            scaled = Arguments(reduce_op(op, average), prescale_factor, postscale_factor)
            slices = _reduce_slices(call, [results[i] for i in sparse], scaled, number)
        for i, result in zip(sparse, slices, strict=True):
            results[i] = result
    if dense:
        with Call(ALLREDUCE, key, number, grouped=True) as call, _on(device_dense):
            scaled = Arguments(reduce_op(op, average), prescale_factor, postscale_factor)
            reduced = call.run([results[i] for i in dense], scaled, compression)
        for i, result in zip(dense, reduced, strict=True):
            results[i] = result
    return results


def _listed(row: Row, tensors: Iterable[Any], name: str | None, process_set: int) -> list[Any]:
    """What a grouped call was given, as a list of our own; what is none fails on all ranks."""
    if isinstance(tensors, (list, tuple)):
        return list(tensors)
    with Call(row, name, process_set, grouped=True):
        if isinstance(tensors, (tf.Tensor, tf.Variable)):
            raise TypeError("a list of tensors is needed, not one of them")
        return list(tensors)


def _reduce_slices(
    call: Call, slices: Sequence[tf.IndexedSlices], scaled: Arguments, process_set: int
) -> list[tf.IndexedSlices]:
    """Gathers all rows: slices of equal index add up. One call, so halves can't be mixed up."""
    if scaled.reduce_op not in (ReduceOp.Average, ReduceOp.Sum):
        raise NotImplementedError(
            f"IndexedSlices are reduced with Average or Sum, not "
            f"{ReduceOp(scaled.reduce_op).name}: use sparse_as_dense=True, or tf.convert_to_tensor"
        )
    if scaled.prescale != 1.0 or scaled.postscale != 1.0:
        raise NotImplementedError("IndexedSlices are reduced without scale factors")
    halves = [half for one in slices for half in (one.values, one.indices)]
    gathered = call.run(halves)
    divisor = len(ranks_of(process_set)) if scaled.reduce_op == ReduceOp.Average else 1
    results = []
    for i, one in enumerate(slices):
        values, indices = gathered[2 * i : 2 * i + 2]
        if divisor != 1:
            values = values / tf.cast(divisor, values.dtype)
        results.append(tf.IndexedSlices(values, indices, dense_shape=one.dense_shape))
    return results


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over the ranks and gives each its part of the rows; all must call it.

    Args:
        tensor: of the same shape, with at least one dimension, and type on every rank.
        device_dense: see `allreduce`.
        compression: see there.
        op: Average or Sum.
        name: see there.
        process_set: who takes part.
        ignore_name_scope: see there.
        prescale_factor: multiplies each rank's term.
        postscale_factor: multiplies the result.

    Returns:
        Rows as even as can be, in the order of the ranks in the set; the first ones get one more if
        they don't divide. A rank may get none.

    Raises:
        ValueError: the set isn't registered, or `op` is another.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "reducescatter")
    key = _named(name, ignore_name_scope)
    with Call(REDUCESCATTER, key, number) as call, _on(device_dense):
        scaled = Arguments(_mean_or_sum(op), prescale_factor, postscale_factor)
        return call.run([tensor], scaled, compression)[0]


@unconverted
def grouped_reducescatter(
    tensors: Iterable[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduces several tensors and gives each rank its rows of all, like `reducescatter`.

    Args:
        tensors: as many on every rank, in the same order.
        device_dense: see `allreduce`.
        compression: see there.
        op: Average or Sum.
        process_set: who takes part.
        prescale_factor: multiplies each rank's terms.
        postscale_factor: multiplies the results.

    Returns:
        This rank's rows, in the order of `tensors`.

    Raises:
        ValueError: the set isn't registered, or `op` is another.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "grouped_reducescatter")
    values = _listed(REDUCESCATTER, tensors, None, number)
    if not values:
        return values
    with Call(REDUCESCATTER, None, number, grouped=True) as call, _on(device_dense):
        scaled = Arguments(_mean_or_sum(op), prescale_factor, postscale_factor)
        return call.run(values, scaled, compression)


def _mean_or_sum(op: int) -> ReduceOp:
    chosen = reduce_op(op, None)
    if chosen not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"reducescatter: op must be Average or Sum, not {chosen.name}")
    return chosen


# ---- Gathers and the rest -----------------------------------------------------------------------


def _check_rows(tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError("a tensor without dimensions has no rows to concatenate")


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the rows of all ranks, in the order of the ranks in the set; all must call it.

    Args:
        tensor: with at least one dimension; ranks may differ in the first, which may be 0.
        name: see `allreduce`.
        ignore_name_scope: see there.
        process_set: who takes part.

    Returns:
        All rows. In a traced function their number is unknown.

    Raises:
        ValueError: the set isn't registered, or the tensor has no dimensions.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "allgather")
    key = _named(name, ignore_name_scope)
    with Call(ALLGATHER, key, number) as call:
        return call.run([tensor], check=_check_rows)[0]


@unconverted
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Concatenates the rows of several tensors, each like `allgather`.

    Args:
        tensors: as many on every rank, in the same order.
        name: see `allreduce`.
        ignore_name_scope: see there.
        process_set: who takes part.

    Returns:
        All rows of each, in the order of `tensors`.

    Raises:
        ValueError: the set isn't registered, or a tensor has no dimensions.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "grouped_allgather")
    key = _named(name, ignore_name_scope)
    values = _listed(ALLGATHER, tensors, key, number)
    if not values:
        return values
    with Call(ALLGATHER, key, number, grouped=True) as call:
        return call.run(values, check=_check_rows)


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Gives every rank the root's tensor; all must call it.

    Args:
        tensor: of the same shape and type on every rank.
        root_rank: the global rank, in the set, whose values count.
        name: see `allreduce`.
        ignore_name_scope: see there.
        process_set: who takes part.

    Returns:
        A tensor like `tensor`, with the root's values.

    Raises:
        ValueError: the set isn't registered.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "broadcast")
    key = _named(name, ignore_name_scope)
    with Call(BROADCAST, key, number) as call:
        return call.run([tensor], Arguments(root=root_rank))[0]


@unconverted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank its part of the rows, and receives a part from each; all must call it.

    Args:
        tensor: with at least one dimension.
        splits: how many rows go to each rank of the set, int32 or int64, at most as many as there
            are; None for equal parts.
        name: see `allreduce`.
        ignore_name_scope: see there.
        process_set: who takes part.

    Returns:
        The rows received, in the order of the ranks; with `splits` the tuple of them and of how
        many came from each rank, int32.

    Raises:
        ValueError: the set isn't registered, or the tensor has no dimensions.
        tf.errors.OpError: see the module; also for splits that don't fit.
    """
    number = calls.uid(process_set, "alltoall")
    key = _named(name, ignore_name_scope)
    with Call(ALLTOALL, key, number) as call:
        parts = tf.zeros([0], tf.int32) if splits is None else _splits(splits)
        output, received = call.run([tensor], Arguments(splits=parts), check=_check_rows)
    return output if splits is None else (output, received)


def _splits(splits: Any) -> tf.Tensor:
    """The user's, as the operator takes them."""
    parts = tf.convert_to_tensor(splits, dtype_hint=tf.int64)  # which holds any number of rows
    if parts.dtype not in (tf.int32, tf.int64):
        raise ValueError(f"splits must be int32 or int64, not {parts.dtype.name}")
    if parts.shape == [0]:
        raise ValueError("there are no splits: each rank of the set needs one")
    return parts


@unconverted
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Writes the root's values into variables; all ranks of the set must call it.

    Args:
        variables: ``tf.Variable`` or ``keras.Variable`` objects, in the same order on every rank.
        root_rank: the global rank whose values count.
        name: a prefix of the calls' names, or None.
        process_set: who takes part.

    Returns:
        The new values.

    Raises:
        ValueError: the set isn't registered, or something else than variables was given.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "broadcast_")
    values = []
    for i, variable in enumerate(variables):
        with Call(BROADCAST, None if name is None else f"{name}.{i}", number) as call:
            if not hasattr(variable, "assign"):
                raise ValueError(f"broadcast_: {variable!r} is no variable")
            values.append(call.run([variable], Arguments(root=root_rank))[0])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return values


@unconverted
def join() -> tf.Tensor:
    """Says that this rank is out of data, and waits until every rank has said so.

    Meanwhile the others' allreduces go on without this rank's terms; Average still divides by the
    size of the set. All ranks must call it. In a traced function it comes after the collectives
    before it and before those after it.

    Returns:
        The rank that joined last, an int32 scalar, the same on every rank.

    Raises:
        tf.errors.OpError: see the module.
    """
    if tf.executing_eagerly():
        last = operators.horovod_join(tensor_name="join.noname", site=names.site(), wait=True)
        ops.renumber()
        return last
    with tf.control_dependencies(names.all_made()):
        last = operators.horovod_join(tensor_name="join.noname", site=names.site(), wait=False)
    names.made(names.JOIN, last.op)
    return last


@unconverted
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it.

    In a traced function it takes its place in the order of what has effects there.

    Args:
        process_set: who waits for whom.

    Raises:
        ValueError: the set isn't registered.
        tf.errors.OpError: see the module.
    """
    number = calls.uid(process_set, "barrier")
    eager = tf.executing_eagerly()
    operators.horovod_barrier(
        tensor_name="barrier.noname", site=names.site(), process_set_id=number, wait=eager
    )


# ---- Numbers of the world as operators, for graphs that outlive it ------------------------------


_NO_SET = (1 << 32) - 1  # a number that no set ever gets


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """How many ranks the set has when this runs, an int32 scalar.

    Raises:
        ValueError: no set has this id now.
        tf.errors.OpError: there is no such set, or no engine, when this runs.
    """
    return operators.horovod_size(process_set_id=uid_of(process_set_id), name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in the set when this runs, an int32 scalar.

    Returns:
        1 if it is; -1 before ``init()``, -3 if there is no such set, -4 if this rank isn't in it.
    """
    try:
        number = uid_of(process_set_id)
    except ValueError:  # an answer, not an error
        number = _NO_SET
    return operators.horovod_process_set_included(process_set_id=number, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """How many ranks this host has when this runs, an int32 scalar."""
    return operators.horovod_local_size(name=name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank when this runs, an int32 scalar."""
    return operators.horovod_rank(name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank on its host when this runs, an int32 scalar."""
    return operators.horovod_local_rank(name=name)
