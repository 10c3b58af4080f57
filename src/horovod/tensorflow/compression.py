"""Compressors for TensorFlow tensors; must not know how or where they are sent."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor[Any]):
    """Sends wider floating-point tensors as `wire`, all others as they are; differentiable.

    Integers, booleans, complex numbers and what is as narrow as `wire` already are left alone.
    """

    wire: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Casts to the wire type; the context is the original type."""
        tensor = tf.convert_to_tensor(tensor)
        narrower = tensor.dtype.is_floating and cls.wire.size < tensor.dtype.size
        return (tf.cast(tensor, cls.wire) if narrower else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Casts back to the original type."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends float32 and float64 as float16: 10 bits of mantissa, magnitudes up to 65504."""

    wire = tf.float16


class BF16Compressor(_CastCompressor):
    """Sends float32 and float64 as bfloat16: 7 bits of mantissa, the range of float32."""

    wire = tf.bfloat16


class Compression:
    """The compressors that come with the library, for the ``compression=`` arguments."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
