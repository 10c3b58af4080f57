"""Collectives in functions that XLA compiles; must not know which the user asked for.

A call becomes a custom call of a handler of our own, which blocks the thread that runs the compiled
program: XLA on processors waits for its handlers, whatever they do. So calls run one after the
other, and if two ranks ran independent ones in different orders, both would wait for ever. XLA
chooses an order by the whole program, which may differ between ranks. Hence the calls of a function
are chained: each takes a token from the one before and gives one to the next, and all run in the
order of the program. Only what comes after a loop or branch isn't held back by the calls in it,
unless it needs their results. Many tensors at once are best one grouped call.

The compiler needs the shapes of results: those of operands, which may be known as late as when XLA
compiles, and this rank's place in the set, which must be known when the function is traced. XLA may
neither drop, merge nor repeat a call that has side effects, and so ours have.

A function that was traced before, outside of the one that XLA compiles, keeps the operators that it
has, and XLA refuses those: "No registered 'HorovodAllreduce' OpKernel for XLA_CPU_JIT devices".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from horovod.common import basics
from horovod.tensorflow import internals, names
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
        "root": int(arguments.root),
        "prescale_bits": bits(arguments.prescale),
        "postscale_bits": bits(arguments.postscale),
    }
    module = _module(attributes, tensors, results)
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


# ---- Order --------------------------------------------------------------------------------------

_tokens: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # the last one of each graph


def _token() -> tf.Tensor:
    """The token for the next call: that of the last one in this graph or the graphs around it."""
    here = tf.compat.v1.get_default_graph()
    for graph in internals.enclosing_graphs(here):
        if (name := _tokens.get(graph)) is not None:
            return graph.get_tensor_by_name(name)
    return tf.constant(0)


def _check_device() -> None:
    """Finds what is known when a function is traced; XLA refuses the rest, see `call_module`."""
    chosen = tf.DeviceSpec.from_string(internals.device()).device_type
    if chosen != "CPU" and tf.config.get_visible_devices("GPU"):
        raise _Impossible(
            "the handler of calls in compiled functions is for the host's memory, and this "
            'function is for a GPU: call it within tf.device("/CPU:0")'
        )


# ---- Shapes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """The shape of a result: its operand's, but for the number of rows."""

    shape: tf.TensorShape
    part: tuple[int, int] | None = None  # of the operand's rows: (operand + first) / second


def _results(row: Row, tensors: Tensors, process_set: int, arguments: Arguments) -> list[_Result]:
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
        return [_Result(tf.TensorShape([n, *tensor.shape[1:]])) for tensor, n in pairs]
    if row is ALLTOALL and arguments.splits.shape != [0]:
        raise _Impossible(
            "the compiler must know how many rows come out: leave out splits for equal parts"
        )
    return [_Result(tensor.shape) for tensor in tensors]


def _part(shape: tf.TensorShape, process_set: int) -> _Result:
    """This rank's rows: as even as can be, the first ones get one more."""
    if shape.rank == 0:
        raise ValueError("a tensor without dimensions has no rows to scatter")
    members = ranks_of(process_set)
    rank = basics.rank()
    place = members.index(rank) if rank in members else 0  # who isn't is told by the engine
    longer, n = len(members) - 1 - place, len(members)
    rows = None if shape[0] is None else (shape[0] + longer) // n
    return _Result(tf.TensorShape([rows, *shape[1:]]), (longer, n))


# ---- The text -----------------------------------------------------------------------------------

_TYPES = {
    tf.uint8: "ui8",
    tf.int8: "i8",
    tf.uint16: "ui16",
    tf.int16: "i16",
    tf.int32: "i32",
    tf.int64: "i64",
    tf.float16: "f16",
    tf.float32: "f32",
    tf.float64: "f64",
    tf.bool: "i1",
    tf.bfloat16: "bf16",
    tf.complex64: "complex<f32>",
    tf.complex128: "complex<f64>",
}


def _module(attributes: dict[str, int | str], tensors: Tensors, results: Sequence[_Result]) -> str:
    """A program that is one custom call.

    Where a dimension is unknown, XLA refines the program once it knows the operands: it works out
    vectors that we give for the shapes of results.
    """
    operands = [_type(tensor.dtype, tensor.shape) for tensor in tensors] + ["tensor<i32>"]
    outputs = [
        _type(tensor.dtype, result.shape) for tensor, result in zip(tensors, results, strict=True)
    ] + ["tensor<i32>"]
    given = [f"%a{i}" for i in range(len(operands))]
    lines: list[str] = []
    shapes: list[tuple[str, str]] = []  # values and their types
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        for i, result in enumerate(results):
            shapes.append(_shape(f"%a{i}", operands[i], result, lines))
        shapes.append(_constant("%token_shape", [], lines))
    last = range(len(operands), len(operands) + len(shapes))
    refined = (
        f"indices_of_shape_operands = dense<{list(last)}> : tensor<{len(shapes)}xi64>, "
        if shapes
        else ""
    )
    configuration = ", ".join(f"{key} = {_value(value)}" for key, value in attributes.items())
    arguments = ", ".join(f"{value}: {kind}" for value, kind in zip(given, operands, strict=True))
    every = ", ".join(outputs)
    body = "\n    ".join(
        [
            *lines,
            f"%r:{len(outputs)} = stablehlo.custom_call @horovod_collective"
            f"({', '.join([*given, *(value for value, _ in shapes)])}) {{"
            f"api_version = 4 : i32, has_side_effect = true, {refined}"
            f"backend_config = {{{configuration}}}}} : "
            f"({', '.join([*operands, *(kind for _, kind in shapes)])}) -> ({every})",
            f"return {', '.join(f'%r#{i}' for i in range(len(outputs)))} : {every}",
        ]
    )
    return (
        "module @horovod attributes {jax.uses_shape_polymorphism = true} {\n"
        f"  func.func public @main({arguments}) -> ({every}) {{\n    {body}\n  }}\n}}\n"
    )


def _shape(operand: str, operand_type: str, result: _Result, lines: list[str]) -> tuple[str, str]:
    """Adds the lines that work out a result's shape; the vector and its type."""
    rank = result.shape.rank
    if rank == 0 or result.shape.is_fully_defined():
        return _constant(f"{operand}_shape", result.shape.as_list(), lines)
    sizes = []
    for i, size in enumerate(result.shape.as_list()):
        value = f"{operand}_{i}"
        sizes.append(value)
        if size is not None:
            _constant(value, [size], lines)
            continue
        lines += [
            f"{value}_s = stablehlo.get_dimension_size {operand}, dim = {i} : "
            f"({operand_type}) -> tensor<i32>",
            f"{value}_v = stablehlo.reshape {value}_s : (tensor<i32>) -> tensor<1xi32>",
        ]
        more, parts = result.part if result.part is not None and i == 0 else (0, 1)
        _constant(f"{value}_more", [more], lines)
        _constant(f"{value}_parts", [parts], lines)
        lines += [
            f"{value}_sum = stablehlo.add {value}_v, {value}_more : tensor<1xi32>",
            f"{value} = stablehlo.divide {value}_sum, {value}_parts : tensor<1xi32>",
        ]
    kinds = ", ".join(["tensor<1xi32>"] * len(sizes))
    vector = f"tensor<{len(sizes)}xi32>"
    lines.append(
        f"{operand}_shape = stablehlo.concatenate {', '.join(sizes)}, dim = 0 : "
        f"({kinds}) -> {vector}"
    )
    return f"{operand}_shape", vector


def _constant(value: str, numbers: list[int], lines: list[str]) -> tuple[str, str]:
    kind = f"tensor<{len(numbers)}xi32>"
    lines.append(f"{value} = stablehlo.constant dense<{numbers or ''}> : {kind}")
    return value, kind


def _type(dtype: tf.DType, shape: tf.TensorShape) -> str:
    sizes = ["?" if size is None else str(size) for size in shape.as_list()]
    return f"tensor<{'x'.join([*sizes, _TYPES[dtype]])}>"


def _value(value: int | str) -> str:
    if isinstance(value, int):
        return f"{value} : i64"
    plain = (chr(byte) if _is_plain(byte) else f"\\{byte:02X}" for byte in value.encode())
    return f'"{"".join(plain)}"'


def _is_plain(byte: int) -> bool:
    return 0x20 <= byte < 0x7F and byte not in b'"\\'
