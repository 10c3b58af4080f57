"""Collectives in functions that XLA compiles; must not know which the user asked for."""

from __future__ import annotations

import tensorflow as tf

from horovod.tensorflow.rows import Arguments, Row, Tensors


def call(
    row: Row, tensors: Tensors, name: str, process_set: int, arguments: Arguments
) -> list[tf.Tensor]:
    """Raises: there is no way yet."""
    raise tf.errors.UnimplementedError(
        None, None, f"{name}: {row.op.name} is not available with jit_compile=True"
    )
