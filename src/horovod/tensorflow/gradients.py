"""The gradients of the operators, made of the same operators; must not know who asks for them.

A rank's loss counts once: the gradient of what a rank gathers from others is the mean of theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.common.ops import ReduceOp
from horovod.tensorflow import calls
from horovod.tensorflow.calls import call
from horovod.tensorflow.rows import ALLGATHER, ALLREDUCE, ALLTOALL, Arguments

Gradients = list[tf.Tensor | None]

_MEAN = Arguments(reduce_op=ReduceOp.Average)


def _factor(operation: Any, name: str) -> float:
    return float(struct.unpack("d", struct.pack("q", operation.get_attr(name)))[0])


def _set_of(operation: Any) -> int:
    return int(operation.get_attr("process_set_id"))


def _dense(operation: Any, grads: Sequence[Any]) -> list[tf.Tensor]:
    """The gradients of all outputs: zeros for those that nothing depends on."""
    return [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, operation.outputs, strict=False)
    ]


def _only_real(operation: Any, grads: Sequence[tf.Tensor]) -> Any:
    """Integers have no gradient."""
    kept = [
        grad if tensor.dtype.is_floating or tensor.dtype.is_complex else None
        for grad, tensor in zip(grads, operation.inputs, strict=False)
    ]
    return kept[0] if len(kept) == 1 else kept


def _allreduce(operation: Any, *grads: Any) -> Any:
    """The sum of the gradients in the way in which the values were reduced."""
    arguments = Arguments(
        reduce_op=operation.get_attr("reduce_op"),
        prescale=_factor(operation, "prescale_bits"),
        postscale=_factor(operation, "postscale_bits"),
    )
    tensors = _dense(operation, grads)
    grouped = operation.type == "HorovodGroupedAllreduce"
    reduced = call(
        ALLREDUCE, tensors, None, _set_of(operation), grouped=grouped, arguments=arguments
    )
    return _only_real(operation, reduced)


def _allgather(operation: Any, *grads: Any) -> Any:
    """A rank's own rows of the mean."""
    process_set = _set_of(operation)
    tensors = _dense(operation, grads)
    grouped = operation.type == "HorovodGroupedAllgather"
    means = call(ALLREDUCE, tensors, None, process_set, grouped=grouped, arguments=_MEAN)
    rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in operation.inputs])
    table = call(ALLGATHER, [rows[tf.newaxis]], None, process_set)[0]
    place = calls.ranks_of(process_set).index(basics.rank())
    starts = tf.reduce_sum(table[:place], axis=0)
    own = [mean[starts[i] : starts[i] + rows[i]] if means else mean for i, mean in enumerate(means)]
    return _only_real(operation, own)


def _broadcast(operation: Any, grad: Any) -> Any:
    """The mean at the root, whose values the others got; zeros at the others."""
    mean = call(ALLREDUCE, _dense(operation, [grad]), None, _set_of(operation), arguments=_MEAN)[0]
    mine = basics.rank() == operation.get_attr("root_rank")
    return _only_real(operation, [mean if mine else tf.zeros_like(mean)])


def _alltoall(operation: Any, grad: Any, _: Any) -> Any:
    """The way back; what was not sent has no influence."""
    (tensor,) = _dense(operation, [grad])
    back = Arguments(splits=operation.outputs[1])
    returned = call(ALLTOALL, [tensor], None, _set_of(operation), arguments=back)[0]
    source = operation.inputs[0]
    missing = tf.shape(source)[0] - tf.shape(returned)[0]
    filling = tf.zeros(tf.concat([[missing], tf.shape(source)[1:]], 0), returned.dtype)
    whole = tf.concat([returned, filling], 0)
    whole.set_shape(source.shape)
    return [_only_real(operation, [whole]), None]


def _reducescatter(operation: Any, *grads: Any) -> Any:
    """Everybody's rows."""
    process_set = _set_of(operation)
    tensors = _dense(operation, grads)
    grouped = operation.type == "HorovodGroupedReducescatter"
    gathered = call(ALLGATHER, tensors, None, process_set, grouped=grouped)
    terms = (
        len(calls.ranks_of(process_set)) if operation.get_attr("reduce_op") == ReduceOp.Sum else 1
    )
    scale = terms * _factor(operation, "prescale_bits") * _factor(operation, "postscale_bits")
    return _only_real(operation, [tensor * tf.cast(scale, tensor.dtype) for tensor in gathered])


for _gradient, _operators in {
    _allreduce: ("HorovodAllreduce", "HorovodGroupedAllreduce"),
    _allgather: ("HorovodAllgather", "HorovodGroupedAllgather"),
    _broadcast: ("HorovodBroadcast",),
    _alltoall: ("HorovodAlltoall",),
    _reducescatter: ("HorovodReducescatter", "HorovodGroupedReducescatter"),
}.items():
    for _operator in _operators:
        tf.RegisterGradient(_operator)(_gradient)
for _operator in (
    "HorovodJoin",
    "HorovodBarrier",
    "HorovodRank",
    "HorovodLocalRank",
    "HorovodSize",
    "HorovodLocalSize",
    "HorovodProcessSetIncluded",
):
    tf.no_gradient(_operator)
