"""The gradients of the collectives, made of collectives; must not know who asks for them.

A rank's loss counts once: the gradient of what a rank gathers from others is the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.common.ops import Op, ReduceOp
from horovod.tensorflow import internals, xla
from horovod.tensorflow.calls import call
from horovod.tensorflow.rows import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    ROWS,
    Arguments,
    Made,
    Row,
    from_bits,
    ranks_of,
)

Gradients = list[tf.Tensor]

_MEAN = Arguments(reduce_op=ReduceOp.Average)


def _mean(made: Made, grads: Gradients) -> Gradients:
    return call(ALLREDUCE, grads, None, made.process_set, grouped=made.grouped, arguments=_MEAN)


def _allreduce(made: Made, grads: Gradients) -> Gradients:
    """The sum of the gradients in the way in which the values were reduced."""
    return call(
        ALLREDUCE,
        grads,
        None,
        made.process_set,
        grouped=made.grouped,
        arguments=made.arguments,
    )


def _allgather(made: Made, grads: Gradients) -> Gradients:
    """A rank's own rows of the mean."""
    members = ranks_of(made.process_set)
    means = _mean(made, grads)
    own = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in made.inputs])
    known = Arguments(rows=(len(members),))
    table = call(ALLGATHER, [own[tf.newaxis]], None, made.process_set, arguments=known)[0]
    starts = tf.reduce_sum(table[: members.index(basics.rank())], axis=0)
    return [
        tf.slice(
            mean,
            tf.concat([starts[i : i + 1], tf.zeros([tf.rank(mean) - 1], tf.int64)], 0),
            tf.shape(tensor, tf.int64),
        )
        for i, (mean, tensor) in enumerate(zip(means, made.inputs, strict=True))
    ]


def _broadcast(made: Made, grads: Gradients) -> Gradients:
    """The mean at the root, whose values the others got; zeros at the others.

    Zeros that depend on the mean: the gradient of this gradient needs a call of every rank.
    """
    mine = basics.rank() == made.arguments.root
    return [tf.where(mine, mean, tf.zeros_like(mean)) for mean in _mean(made, grads)]


def _alltoall(made: Made, grads: Gradients) -> Gradients:
    """The way back; what was not sent has no influence."""
    back = Arguments(splits=made.outputs[1])
    returned = call(ALLTOALL, grads[:1], None, made.process_set, arguments=back)[0]
    (source,) = made.inputs
    missing = tf.shape(source)[0] - tf.shape(returned)[0]
    filling = tf.zeros(tf.concat([[missing], tf.shape(source)[1:]], 0), returned.dtype)
    whole = tf.concat([returned, filling], 0)
    whole.set_shape(source.shape)
    return [whole]


def _reducescatter(made: Made, grads: Gradients) -> Gradients:
    """Everybody's rows."""
    known = Arguments(rows=tuple(tensor.shape[0] for tensor in made.inputs))
    gathered = call(ALLGATHER, grads, None, made.process_set, grouped=made.grouped, arguments=known)
    is_sum = made.arguments.reduce_op == ReduceOp.Sum
    terms = len(ranks_of(made.process_set)) if is_sum else 1
    scale = terms * made.arguments.prescale * made.arguments.postscale
    return [tensor * tf.cast(scale, tensor.dtype) for tensor in gathered]


_LAWS: dict[Op, Callable[[Made, Gradients], Gradients]] = {
    ALLREDUCE.op: _allreduce,
    ALLGATHER.op: _allgather,
    BROADCAST.op: _broadcast,
    ALLTOALL.op: _alltoall,
    REDUCESCATTER.op: _reducescatter,
}


def gradient(made: Made, grads: Sequence[Any]) -> list[tf.Tensor | None]:
    """The gradients of a call's tensors.

    Args:
        made: the call.
        grads: of its outputs, None for those that nothing depends on.

    Returns:
        A gradient for each input, or None: integers have none.
    """
    dense = [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, made.outputs, strict=False)
    ]
    return [
        grad if tensor.dtype.is_floating or tensor.dtype.is_complex else None
        for grad, tensor in zip(_LAWS[made.row.op](made, dense), made.inputs, strict=True)
    ]


def _of_operator(row: Row, grouped: bool) -> Callable[..., list[tf.Tensor | None]]:
    def of_operation(operation: Any, *grads: Any) -> list[tf.Tensor | None]:
        inputs = list(operation.inputs)
        tensors = inputs if grouped else inputs[:1]  # without the splits
        arguments = Arguments(
            reduce_op=operation.get_attr("reduce_op"),
            prescale=from_bits(operation.get_attr("prescale_bits")),
            postscale=from_bits(operation.get_attr("postscale_bits")),
            root=operation.get_attr("root_rank"),
        )
        process_set = int(operation.get_attr("process_set_id"))
        made = Made(row, grouped, process_set, arguments, tensors, operation.outputs)
        return [*gradient(made, grads), *[None] * (len(inputs) - len(tensors))]

    return of_operation


of_alltoall = _of_operator(ALLTOALL, grouped=False)
"""The gradient of that operator, which programs call by hand."""

for _row in ROWS:
    for _grouped in (False, True) if _row.grouped is not None else (False,):
        _operator = _row.operator(grouped=_grouped)
        tf.RegisterGradient(_operator)(_of_operator(_row, grouped=_grouped))
        internals.never_vectorize(_operator)
xla.set_gradient(gradient)
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
