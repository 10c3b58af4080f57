"""Collectives in functions that XLA compiles; must not know which the user asked for.

A call becomes a custom call of a handler of our own, which blocks the thread that runs the compiled
program: XLA on processors waits for its handlers, whatever they do. So calls run one after the
other, and if two ranks ran independent ones in different orders, both would wait for ever. XLA
chooses an order by the whole program, which may differ between ranks. Hence the calls of a function
are chained: each takes a token from the one before and gives one to the next, and all run in the
order of the program. Only what comes after a loop, a branch or a nested function isn't held back by
the calls in it, unless it needs their results. Many tensors at once are best one grouped call.

The compiler needs the shapes of results: those of operands, which may be known as late as when XLA
compiles, and this rank's place in the set, which must be known when the function is traced. XLA may
neither drop, merge nor repeat a call that has side effects, and so ours have.

A function that was traced before, outside of the one that XLA compiles, keeps the operators that it
has, and XLA refuses those: "No registered 'HorovodAllreduce' OpKernel for XLA_CPU_JIT devices".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from horovod.common import basics, ops
from horovod.tensorflow import internals, names, stablehlo
from horovod.tensorflow.native import register_with_xla
from horovod.tensorflow.rows import (
    ALLGATHER,
    ALLTOALL,
    REDUCESCATTER,
    Arguments,
    Made,
    Row,
    Tensors,
    bits,
    ranks_of,
)
from horovod.tensorflow.stablehlo import Result

Gradient = Callable[[Made, Sequence[Any]], list[tf.Tensor | None]]

_gradient: Gradient | None = None


def set_gradient(gradient: Gradient) -> None:
    """Says how the gradients of calls are made; before the first call."""
    global _gradient
    _gradient = gradient


def call(
    row: Row,
    tensors: Tensors,
    name: str,
    process_set: int,
    grouped: bool,
    arguments: Arguments,
) -> list[tf.Tensor]:
    """Makes the call of a collective in the function that is being traced.

    Args:
        row: which one.
        tensors: one, unless the call is grouped.
        name: of the call, in full.
        process_set: the engine's own number of the set.
        grouped: the tensors are agreed on and reduced together.
        arguments: what else the collective needs.

    Returns:
        The outputs; after alltoall's the received splits.

    Raises:
        ValueError: a tensor has no dimensions where the collective needs rows.
        tf.errors.UnimplementedError: XLA can't do it: the text says why, and what to do.
    """
    try:
        _check_device()
        results = _results(row, tensors, process_set, arguments)
        if problem := register_with_xla():
            raise _Impossible(problem)
    except _Impossible as error:
        raise tf.errors.UnimplementedError(
            None,
            None,
            f"{row.operator(grouped=grouped)}: {name}: not with jit_compile=True: {error}; or use "
            "jit_compile=False",
        ) from None
    token = _token()
    attributes: dict[str, int | str] = {
        "operator": row.operator(grouped=grouped),
        "name": name,
        "site": names.site(),
        "kind": row.op.kind,
        "set": process_set,
        "op": int(arguments.reduce_op),
        "root": ops.root_number(arguments.root),
        "prescale_bits": bits(arguments.prescale),
        "postscale_bits": bits(arguments.postscale),
    }
    module = stablehlo.custom_call("horovod_collective", attributes, tensors, results)
    shapes = [(tensor.dtype, result.shape) for tensor, result in zip(tensors, results, strict=True)]

    @tf.custom_gradient
    def differentiable(*inputs: tf.Tensor) -> Any:
        *outputs, after = internals.call_module(module, [*inputs, token], [*shapes, (tf.int32, [])])
        _tokens[after.graph] = after.name
        made = Made(row, grouped, process_set, arguments, inputs, outputs)
        if row is ALLTOALL:  # all parts are equal, on the way back too
            made = replace(made, outputs=[*outputs, arguments.splits])

        def gradient(*grads: Any) -> list[tf.Tensor | None]:
            assert _gradient is not None
            return _gradient(made, grads)

        return outputs, gradient

    outputs = list(differentiable(*tensors))
    if row is ALLTOALL:
        members = len(ranks_of(process_set))
        outputs.append(tf.fill([members], tf.shape(outputs[0])[0] // members))
    return outputs


class _Impossible(Exception):
    """Why XLA can't do a call, and what to do about it."""


def _check_device() -> None:
    """Finds what is known when a function is traced; XLA refuses the rest, see `call_module`."""
    chosen = tf.DeviceSpec.from_string(internals.device()).device_type
    if chosen != "CPU" and tf.config.get_visible_devices("GPU"):
        raise _Impossible(
            "the handler of calls in compiled functions is for the host's memory, and this "
            'function is for a GPU: call it within tf.device("/CPU:0")'
        )


# ---- Order --------------------------------------------------------------------------------------

_tokens: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # the last one of each graph


def _token() -> tf.Tensor:
    """The token for the next call: that of the last one in this graph or the graphs around it."""
    here = tf.compat.v1.get_default_graph()
    for graph in internals.enclosing_graphs(here):
        if (name := _tokens.get(graph)) is not None:
            return graph.get_tensor_by_name(name)
    return tf.constant(0)


# ---- Shapes -------------------------------------------------------------------------------------


def _results(row: Row, tensors: Tensors, process_set: int, arguments: Arguments) -> list[Result]:
    if any(tensor.shape.rank is None for tensor in tensors):
        raise _Impossible("the number of dimensions isn't known: use tf.ensure_shape")
    if row is REDUCESCATTER:
        return [_part(tensor.shape, process_set) for tensor in tensors]
    if row is ALLGATHER:
        rows = arguments.rows or [None] * len(tensors)
        if any(number is None for number in rows):
            raise _Impossible(
                "the compiler must know how many rows come out, and those of other ranks aren't "
                "known: reduce IndexedSlices as dense tensors (sparse_as_dense=True)"
            )
        pairs = zip(tensors, rows, strict=True)
        return [Result(tf.TensorShape([n, *tensor.shape[1:]])) for tensor, n in pairs]
    if row is ALLTOALL and arguments.splits.shape != [0]:
        raise _Impossible(
            "the compiler must know how many rows come out: leave out splits for equal parts"
        )
    return [Result(tensor.shape) for tensor in tensors]


def _part(shape: tf.TensorShape, process_set: int) -> Result:
    """This rank's rows: as even as can be, the first ones get one more."""
    if shape.rank == 0:
        raise ValueError("a tensor without dimensions has no rows to scatter")
    members = ranks_of(process_set)
    rank = basics.rank()
    place = members.index(rank) if rank in members else 0  # who isn't is told by the engine
    longer, n = len(members) - 1 - place, len(members)
    rows = None if shape[0] is None else (shape[0] + longer) // n
    return Result(tf.TensorShape([rows, *shape[1:]]), (longer, n))
