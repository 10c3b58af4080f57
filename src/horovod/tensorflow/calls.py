"""How a collective becomes an operator's call; must not know which collective the user asked for.

A call takes tensors and gives tensors: eagerly it blocks, in a traced function it makes a node that
runs as soon as its inputs are there, and in a function that XLA compiles a call of our own handler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from horovod.common import ops
from horovod.common.compression import NoneCompressor
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import internals, names, xla
from horovod.tensorflow.rows import ALLTOALL, Arguments, Row, Tensors, bits


def uid(process_set: ProcessSet, what: str) -> int:
    """The engine's own number of a set, whether or not this rank is in it.

    Raises:
        TypeError: this is no process set.
        ValueError: the set is not registered, or not any more.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{what}: process_set must be a ProcessSet, not {process_set!r}")
    if process_set.uid is None:
        raise ValueError(
            f"{what}: {process_set} is not registered: see init() and add_process_set()"
        )
    return process_set.uid


@internals.unconverted
def call(
    row: Row,
    values: Sequence[Any],
    name: str | None,
    process_set: int,
    *,
    grouped: bool = False,
    arguments: Arguments | None = None,
    compression: Any = NoneCompressor,
    check: Callable[[Tensors], None] | None = None,
) -> list[tf.Tensor]:
    """Makes the call of a collective.

    Args:
        row: which one.
        values: what can be converted to tensors; one, unless the call is grouped.
        name: the user's, or None.
        process_set: the engine's own number of the set.
        grouped: the tensors are agreed on and reduced together.
        arguments: what else the collective needs.
        compression: what the tensors become for the way.
        check: raises ValueError if the tensors can't be right.

    Returns:
        The outputs, in the order of `values`; after alltoall's the received splits.

    Raises:
        ValueError: a value can't be a tensor, or `check` says so; the other ranks' calls fail too.
        tf.errors.UnimplementedError: XLA can't do it; the other ranks' calls fail too.
        tf.errors.OpError: see `horovod.tensorflow`.
    """
    prefix = f"grouped_{row.op.name}" if grouped else row.op.name
    full_name = names.call_name(prefix, name, process_set)
    try:
        pairs = [compression.compress(tf.convert_to_tensor(value)) for value in values]
        tensors = [_supported(tensor) for tensor, _ in pairs]
        if check is not None:
            check(tensors)
        told = arguments or Arguments()
        if row is ALLTOALL:
            told = replace(told, splits=tf.convert_to_tensor(told.splits, dtype_hint=tf.int32))
        route = xla.call if internals.is_compiling() else _call
        outputs = route(row, tensors, full_name, process_set, grouped, told)
        for i, (_, context) in enumerate(pairs):
            outputs[i] = compression.decompress(outputs[i], context)
        return outputs
    except (TypeError, ValueError, tf.errors.UnimplementedError) as error:
        ops.reject(row.op, full_name, process_set, error)
        raise


_DTYPES = frozenset(tf.as_dtype(dtype.name) for dtype in ops.DType)


def _supported(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"data type {tensor.dtype.name} is not supported")
    return tensor


def _call(
    row: Row, tensors: Tensors, name: str, process_set: int, grouped: bool, arguments: Arguments
) -> list[tf.Tensor]:
    attributes = {
        "tensor_name": name,
        "site": names.site(),
        "process_set_id": process_set,
        "reduce_op": int(arguments.reduce_op),
        "prescale_bits": bits(arguments.prescale),
        "postscale_bits": bits(arguments.postscale),
        "root_rank": int(arguments.root),
        "wait": tf.executing_eagerly(),
    }

    def make() -> list[tf.Tensor]:
        if grouped:
            assert row.grouped is not None
            return list(row.grouped(list(tensors), **attributes))
        if row is ALLTOALL:
            return list(row.single(tensors[0], arguments.splits, **attributes))
        return [row.single(tensors[0], **attributes)]

    if tf.executing_eagerly():
        return make()
    key = f"{process_set}/{name}"
    with tf.control_dependencies(names.made_before(key)):
        outputs = make()
    names.made(key, outputs[0].op)
    internals.run_independently(outputs[0].op)
    return outputs
