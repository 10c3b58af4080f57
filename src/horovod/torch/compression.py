"""Compressors for torch tensors; must not know how or where they are sent."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from horovod.common.compression import Compressor, NoneCompressor, bound

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "FP16Compressor",
    "NoneCompressor",
]


class _CastCompressor(Compressor[torch.Tensor]):
    """Sends wider floating-point tensors as `wire`, all others as they are; differentiable.

    Integers, booleans, complex numbers and what is as narrow as `wire` already are left alone.
    """

    wire: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Casts to the wire type; the context is the original type."""
        narrower = tensor.is_floating_point() and cls.wire.itemsize < tensor.element_size()
        return (tensor.to(cls.wire) if narrower else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Casts back to the original type."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends float32 and float64 as float16: 10 bits of mantissa, magnitudes up to 65504."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends float32 and float64 as bfloat16: 7 bits of mantissa, the range of float32."""

    wire = torch.bfloat16


class ErrorFeedback(Compressor[torch.Tensor]):
    """Adds to each tensor what compression dropped from the one before it.

    What is sent over many steps then sums up to what was to be sent, but for one last residual, so
    that an optimizer also moves where each single gradient rounds to the value before it or to
    zero. Costs memory of the size of the tensors. Use one object for one optimizer::

        opt = hvd.DistributedOptimizer(opt, model.named_parameters(),
                                       compression=hvd.Compression.error_feedback(hvd.Compression.fp16))

    Each name has a residual of its own, see `bind`; used without a name, the object has a single
    one. It starts anew where the shape, type or device of the tensor changes. Residuals are in the
    tensor's own type; integers and booleans have none. What isn't finite, as after an overflow
    that a gradient scaler is looking for, leaves no residual either. The rounding of the reduced
    result to the type that travels, the same on all ranks, is not fed back. Residuals belong to
    this process and are in no ``state_dict``: a restart loses one step's rounding.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014); Karimireddy et al.,
    Error Feedback Fixes SignSGD (arXiv:1901.09847).

    Args:
        inner: any compressor, a class or an object. Its ``decompress`` must be able to restore what
            its ``compress`` gave, without the way between ranks.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._residual: torch.Tensor | None = None
        self._bound: dict[str, ErrorFeedback] = {}

    def bind(self, name: str) -> ErrorFeedback:
        """The compressor for the tensor of this name, with its own residual; always the same."""
        if name not in self._bound:
            self._bound[name] = ErrorFeedback(bound(self._inner, name))
        return self._bound[name]

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        """Compresses the tensor plus the residual, and keeps what that drops; differentiable."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            packed: tuple[torch.Tensor, Any] = self._inner.compress(tensor)
            return packed
        old = self._residual
        if old is not None and _kind(old) == _kind(tensor):
            tensor = tensor + old
        wire, context = self._inner.compress(tensor)
        with torch.no_grad():
            dropped = tensor - self._inner.decompress(wire, context)
            # One infinity would come back in every later step.
            self._residual = torch.where(dropped.isfinite(), dropped, 0).detach()
        return wire, context

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]
        """Gives the reduced tensor its original form, as the inner compressor does."""
        restored: torch.Tensor = self._inner.decompress(tensor, ctx)
        return restored


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class Compression:
    """The compressors that come with the library, for the ``compression=`` arguments."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    error_feedback = ErrorFeedback
