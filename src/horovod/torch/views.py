"""Turns torch tensors into views for the engine; must not know which collective they are for.

A row-major CPU tensor is read and written where it lies. Any other layout is copied when the call
is submitted and, for the in-place forms, copied back when it is synchronized, so ranks may differ
in layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from horovod.common import ops
from horovod.common.ops import View

_DTYPES = {
    getattr(torch, dtype.name): int(dtype) for dtype in ops.DType if hasattr(torch, dtype.name)
}
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


class Staged(NamedTuple):
    """A tensor that is ready for the engine."""

    view: View
    memory: tuple[torch.Tensor, ...]
    """What the view points into."""
    finish: Callable[[Any], torch.Tensor]
    """Gives the user's tensor, from the engine's output if the view has none."""


def _dtype(tensor: torch.Tensor) -> int:
    """The engine's number of the type, once the tensor is known to have memory to point at."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"a {tensor.layout} tensor is not supported: pass tensor.to_dense()")
    if tensor.is_quantized:
        raise ValueError("a quantized tensor is not supported: pass tensor.dequantize()")
    if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
        raise ValueError(f"a {type(tensor).__name__} is not supported: it has no memory of its own")
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} is not supported: pass tensor.cpu()")
    number = _DTYPES.get(tensor.dtype)
    if number is None:
        raise ValueError(f"data type {tensor.dtype} is not supported")
    return number


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError as error:  # a functorch wrapper
        raise ValueError(f"this tensor has no memory of its own: {error}") from error


def _row_major(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The tensor's values in row-major order, and whether that is a copy.

    The result refers to the memory itself, whatever the user assigns to `tensor` while the engine
    works.
    """
    alias = tensor.detach()
    if alias.is_contiguous() and not alias.is_conj() and not alias.is_neg():
        return alias, False
    return alias.resolve_conj().resolve_neg().contiguous(), True


def to_new(tensor: torch.Tensor) -> Staged:
    """For a result in a new tensor of the same shape; a copied input is its own output."""
    dtype = _dtype(tensor)
    source, copied = _row_major(tensor)
    output = source if copied else torch.empty_like(source, memory_format=torch.contiguous_format)
    view = View(_pointer(source), _pointer(output), dtype, tuple(source.shape))
    return Staged(view, (source, output), lambda _: output)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: a stride is within the reach of the smaller ones."""
    reach = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride <= reach:
                return True
            reach += stride * (n - 1)
    return False


def in_place(tensor: torch.Tensor) -> Staged:
    """For a result that replaces the input."""
    dtype = _dtype(tensor)
    if not tensor.is_contiguous() and _overlaps(tensor):
        raise ValueError(
            "an expanded or overlapping tensor can't be written in place: pass tensor.contiguous()"
        )
    memory, copied = _row_major(tensor)
    pointer = _pointer(memory)

    def finish(_: Any) -> torch.Tensor:
        if copied:
            # Inference tensors are written in inference mode only, leaves without autograd only.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(memory)
        elif not tensor.is_inference():
            # Autograd shall notice if backward needs what was overwritten.
            torch.autograd.graph.increment_version(tensor)
        return tensor

    return Staged(View(pointer, pointer, dtype, tuple(memory.shape)), (memory,), finish)


def to_engine(tensor: torch.Tensor) -> Staged:
    """For a result of other rows, for which the engine allocates the memory."""
    dtype = _dtype(tensor)
    source, _ = _row_major(tensor)
    view = View(_pointer(source), 0, dtype, tuple(source.shape))
    return Staged(view, (source,), from_dlpack)
