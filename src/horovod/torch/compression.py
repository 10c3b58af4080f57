"""Compressors for torch tensors; must not know how or where they are sent."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor[torch.Tensor]):
    """Sends floating-point tensors as `wire`, others as they are; differentiable."""

    wire: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Casts to the wire type; the context is the original type."""
        return (tensor.to(cls.wire) if tensor.is_floating_point() else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Casts back to the original type."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16: 10 bits of mantissa, magnitudes up to 65504."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16: 7 bits of mantissa, the range of float32."""

    wire = torch.bfloat16


class Compression:
    """The compressors that come with the library, for the ``compression=`` arguments."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
