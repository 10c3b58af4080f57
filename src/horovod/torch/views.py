"""Turns torch tensors into views for the engine; must not know which collective they are for.

A row-major CPU tensor is read and written where it lies. Any other layout is copied when the call
is submitted and, for the in-place forms, copied back when it is synchronized, so ranks may differ
in layout, and in device.

There are two ways. The core itself reads nearly all row-major CPU tensors, by a `Form`. Whatever it
can't read is *staged*: that way knows every kind of tensor, and says what is wrong with one that
can't be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from horovod.common import ops
from horovod.common.ops import Form, View
from horovod.torch.device import Staging, staging

_DTYPES = {
    getattr(torch, dtype.name): int(dtype) for dtype in ops.DType if hasattr(torch, dtype.name)
}
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


class Staged(NamedTuple):
    """A tensor that is ready for the engine once `ready` has returned."""

    view: View
    memory: object
    """What the view points into, whatever the user assigns to the tensor meanwhile."""
    ready: Callable[[], None]
    """Blocks until the input is in the view."""
    finish: Callable[[Any, int], torch.Tensor]
    """Gives the user's tensor, from the engine's result and the tensor's place in the call."""


def require_tensor(value: object) -> None:
    """Raises TypeError for anything else."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a torch.Tensor is needed, not {type(value).__name__}")


try:
    torch._C._increment_version([])  # type: ignore[arg-type,unused-ignore]
    _count_up: Callable[[Any], None] = torch._C._increment_version
except TypeError:  # before torch 2.4 it takes one tensor

    def _count_up(tensors: Any) -> None:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def _dtype(tensor: torch.Tensor) -> int:
    """The engine's number of the type, once the tensor is known to have memory to point at."""
    require_tensor(tensor)
    if tensor.layout is not torch.strided:
        raise ValueError(f"a {tensor.layout} tensor is not supported: pass tensor.to_dense()")
    if tensor.is_nested:
        raise ValueError("a nested tensor is not supported: pass tensor.to_padded_tensor(padding)")
    if tensor.is_quantized:
        raise ValueError("a quantized tensor is not supported: pass tensor.dequantize()")
    if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
        raise ValueError(f"a {type(tensor).__name__} is not supported: it has no memory of its own")
    number = _DTYPES.get(tensor.dtype)
    if number is None:
        raise ValueError(f"data type {tensor.dtype} is not supported")
    return number


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError as error:  # a functorch wrapper
        raise ValueError(f"this tensor has no memory of its own: {error}") from error


def _input(way: Staging, tensor: torch.Tensor) -> tuple[torch.Tensor, bool, Callable[[], None]]:
    """The values on the host in row-major order, whether that is a copy, and the wait for them.

    If not a copy it refers to the memory itself, whatever the user assigns to `tensor` while the
    engine works.
    """
    alias = tensor.detach()
    memory, ready = way.to_host(alias)
    return memory, memory is not alias, ready


def _stage_new(tensor: torch.Tensor) -> Staged:
    """A copied input is its own output."""
    dtype = _dtype(tensor)
    way = staging(tensor)
    source, copied, ready = _input(way, tensor)
    output = source if copied else torch.empty_like(source, memory_format=torch.contiguous_format)
    view = View(_pointer(source), _pointer(output), dtype, tuple(source.shape))
    return Staged(view, (source, output), ready, lambda *_: way.place(output, tensor))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: a stride is within the reach of the smaller ones."""
    reach = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride <= reach:
                return True
            reach += stride * (n - 1)
    return False


def written(*tensors: torch.Tensor) -> None:
    """Autograd shall notice if backward needs what the engine has overwritten."""
    try:
        _count_up(tensors)
    except RuntimeError:  # inference tensors have no count
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _written_one(tensor: torch.Tensor) -> torch.Tensor:
    written(tensor)
    return tensor


def _written_all(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    written(*tensors)
    return tensors


def _stage_in_place(tensor: torch.Tensor) -> Staged:
    dtype = _dtype(tensor)
    if not tensor.is_contiguous() and _overlaps(tensor):
        raise ValueError(
            "an expanded or overlapping tensor can't be written in place: pass tensor.contiguous()"
        )
    way = staging(tensor)
    memory, copied, ready = _input(way, tensor)
    pointer = _pointer(memory)

    def finish(*_: Any) -> torch.Tensor:
        if not copied:
            return _written_one(tensor)
        # Inference tensors are written in inference mode only, leaves without autograd only.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            way.overwrite(tensor, memory)
        return tensor

    return Staged(View(pointer, pointer, dtype, tuple(memory.shape)), (memory,), ready, finish)


def _stage_input(tensor: torch.Tensor) -> Staged:
    dtype = _dtype(tensor)
    way = staging(tensor)
    source, _, ready = _input(way, tensor)
    view = View(_pointer(source), 0, dtype, tuple(source.shape))
    return Staged(view, (source,), ready, lambda *of: way.place(_allocated(*of), tensor))


def _allocated(result: Any, place: int = 0) -> torch.Tensor:
    """The output that the engine has made."""
    output: torch.Tensor = from_dlpack(result.output(place))
    return output


def _all_allocated(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple([from_dlpack(output) for output in result.outputs])


@dataclass(frozen=True)
class Way:
    """How tensors get to the engine, and results to the user."""

    form: Form
    """For what the engine can read."""
    stage: Callable[[torch.Tensor], Staged]
    """For whatever it can't."""


def _form(*, in_place: bool, allocate: Any = None, one: Any = None, group: Any = None) -> Form:
    # Tensors of other versions of torch don't say where they lie.
    types = (torch.Tensor, torch.nn.Parameter)
    hidden, memory = torch.Tensor.is_neg, torch.Tensor.untyped_storage
    return Form(types, hidden, memory, in_place, allocate, one, group)


IN_PLACE = Way(_form(in_place=True, one=_written_one, group=_written_all), _stage_in_place)
"""The result replaces the input."""
UNCOUNTED = _form(in_place=True)
"""As that of IN_PLACE, for who calls `written` himself."""
TO_NEW = Way(_form(in_place=False, allocate=torch.empty_like), _stage_new)
"""The result is a new tensor of the same shape."""
TO_ENGINE = Way(_form(in_place=False, one=_allocated, group=_all_allocated), _stage_input)
"""The result has other rows, and the engine allocates it."""
