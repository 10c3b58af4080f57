"""The text of a program that is one custom call; must not know what is called.

The call takes tensors and a token, an int32 scalar, and gives as many tensors and a token. It has
side effects: XLA neither drops, merges nor moves it out of loops.

Where a dimension is unknown, XLA refines the program once it knows its operands, and needs vectors
of the shapes of all results for that. It works them out and takes them away again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Result:
    """A result: like the operand at the same place, but for the number of rows."""

    shape: tf.TensorShape
    part: tuple[int, int] = (0, 1)
    """Rows that are unknown yet are (those of the operand + first) // second."""


_TOKEN = "tensor<i32>"
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


def custom_call(
    target: str,
    attributes: Mapping[str, int | str],
    tensors: Sequence[tf.Tensor],
    results: Sequence[Result],
) -> str:
    """Makes the program.

    Args:
        target: the name of the handler, of XLA's typed interface.
        attributes: what the handler gets besides, as int64 and strings.
        tensors: the operands, of known numbers of dimensions.
        results: one for each operand.
    """
    operands = [_type(tensor.dtype, tensor.shape) for tensor in tensors]
    outputs = [_type(tensor.dtype, one.shape) for tensor, one in zip(tensors, results, strict=True)]
    lines: list[str] = []
    shapes: list[tuple[str, str]] = []  # values and their types
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        for i, (kind, result) in enumerate(zip(operands, results, strict=True)):
            shapes.append(_shape(f"%a{i}", kind, result, lines))
        shapes.append(_constant("%token_shape", [], lines))
    operands.append(_TOKEN)
    outputs.append(_TOKEN)
    inputs = [(f"%a{i}", kind) for i, kind in enumerate(operands)]
    values, kinds = zip(*inputs, *shapes, strict=True)
    configuration = {
        "api_version": "4 : i32",
        "has_side_effect": "true",
        "backend_config": _dictionary({name: _value(it) for name, it in attributes.items()}),
    }
    if shapes:
        places = list(range(len(inputs), len(inputs) + len(shapes)))
        configuration["indices_of_shape_operands"] = f"dense<{places}> : tensor<{len(places)}xi64>"
    n = len(outputs)
    lines.append(
        f"%r:{n} = stablehlo.custom_call @{target}({', '.join(values)}) "
        f"{_dictionary(configuration)} : ({', '.join(kinds)}) -> ({', '.join(outputs)})"
    )
    lines.append(f"return {', '.join(f'%r#{i}' for i in range(n))} : {', '.join(outputs)}")
    signature = f"({', '.join(f'{value}: {kind}' for value, kind in inputs)})"
    return "\n".join(
        [
            "module @horovod attributes {jax.uses_shape_polymorphism = true} {",
            f"func.func public @main{signature} -> ({', '.join(outputs)}) {{",
            *lines,
            "}}",
        ]
    )


def _shape(operand: str, kind: str, result: Result, lines: list[str]) -> tuple[str, str]:
    """Adds the lines that work out a result's shape; the vector and its type."""
    vector = f"{operand}_shape"
    if result.shape.is_fully_defined():
        return _constant(vector, result.shape.as_list(), lines)
    sizes = []
    for i, size in enumerate(result.shape.as_list()):
        sizes.append(f"{operand}_{i}")
        if size is None:
            more, parts = result.part if i == 0 else (0, 1)
            lines += _unknown_size(sizes[-1], operand, kind, i, more, parts)
        else:
            _constant(sizes[-1], [size], lines)
    kinds = ", ".join(["tensor<1xi32>"] * len(sizes))
    vector_type = f"tensor<{len(sizes)}xi32>"
    lines.append(
        f"{vector} = stablehlo.concatenate {', '.join(sizes)}, dim = 0 : ({kinds}) -> {vector_type}"
    )
    return vector, vector_type


def _unknown_size(
    value: str, operand: str, kind: str, dimension: int, more: int, parts: int
) -> list[str]:
    lines = [
        f"{value}_size = stablehlo.get_dimension_size {operand}, dim = {dimension} : "
        f"({kind}) -> tensor<i32>",
        f"{value}_own = stablehlo.reshape {value}_size : (tensor<i32>) -> tensor<1xi32>",
    ]
    _constant(f"{value}_more", [more], lines)
    _constant(f"{value}_parts", [parts], lines)
    return [
        *lines,
        f"{value}_sum = stablehlo.add {value}_own, {value}_more : tensor<1xi32>",
        f"{value} = stablehlo.divide {value}_sum, {value}_parts : tensor<1xi32>",
    ]


def _constant(value: str, numbers: list[int], lines: list[str]) -> tuple[str, str]:
    kind = f"tensor<{len(numbers)}xi32>"
    lines.append(f"{value} = stablehlo.constant dense<{numbers or ''}> : {kind}")
    return value, kind


def _type(dtype: tf.DType, shape: tf.TensorShape) -> str:
    sizes = ["?" if size is None else str(size) for size in shape.as_list()]
    return f"tensor<{'x'.join([*sizes, _TYPES[dtype]])}>"


def _dictionary(values: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{name} = {value}' for name, value in values.items())}}}"


def _value(value: int | str) -> str:
    if isinstance(value, int):
        return f"{value} : i64"
    return f'"{"".join(map(_letter, value.encode()))}"'


def _letter(byte: int) -> str:
    plain = 0x20 <= byte < 0x7F and byte not in b'"\\'
    return chr(byte) if plain else f"\\{byte:02X}"
