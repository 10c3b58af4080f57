"""A device that exists only in this process, and does nothing until somebody waits for it.

Tensors of it are `OnDevice`: plain memory whose in-place operations are queued on the current
stream instead of being done. Queued work knows memory by its address, as hardware does, and fails
if that has been given back meanwhile. What is used on the stream that it was made for may be given
back early, as with a caching allocator: other users of the memory queue up behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

DEVICE = torch.device("privateuseone", 0)
GARBAGE = 0x5B


class Stream:
    def __init__(self, device: torch.device = DEVICE) -> None:
        assert device == DEVICE
        self.queue: deque[Callable[[], None]] = deque()

    def wait_event(self, event: Event) -> None:
        stream, mark = event.stream, event.mark
        self.queue.append(lambda: stream.run(mark))

    def run(self, mark: object = None) -> None:
        """Does the work up to the mark, or all of it."""
        while self.queue and (mark is None or mark in self.queue):
            self.queue.popleft()()


class Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.mark = lambda: None
        stream.queue.append(self.mark)

    def query(self) -> bool:
        return self.mark not in self.stream.queue

    def synchronize(self) -> None:
        self.stream.run(self.mark)


class Runtime:
    """What of ``torch.cuda`` the library uses."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.current = Stream()

    def current_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


RUNTIME = Runtime()
_alive: dict[int, int] = {}  # address → bytes
_home: dict[int, Stream] = {}  # address → the stream it was made for, unless it is the host's


def memory(shape: Any, *, dtype: torch.dtype) -> torch.Tensor:
    """Memory full of garbage that is known until its last tensor is gone."""
    shape = torch.Size(shape)
    count = shape.numel() * dtype.itemsize
    buffer = np.full(max(count, 1), GARBAGE, np.uint8)
    address = buffer.ctypes.data
    _alive[address] = len(buffer)
    weakref.finalize(buffer, _give_back, address)
    return torch.from_numpy(buffer)[:count].view(dtype).view(shape)


def _give_back(address: int) -> None:
    del _alive[address]
    _home.pop(address, None)


def _device_memory(shape: Any, *, dtype: torch.dtype) -> OnDevice:
    made = memory(shape, dtype=dtype)
    _home[made.untyped_storage().data_ptr()] = RUNTIME.current
    return made.as_subclass(OnDevice)


def _raw(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The tensor by its address: finds it again, if its memory is still there."""
    with torch._C.DisableTorchFunctionSubclass():
        base = tensor.untyped_storage().data_ptr()
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        offset, conjugated = tensor.storage_offset(), tensor.is_conj()
    if base not in _alive:  # ordinary memory of the host, which a driver reads at once
        values = tensor.clone()
        return lambda: values
    kept = tensor if _home.get(base) is RUNTIME.current else None

    def find(kept: object = kept) -> torch.Tensor:
        assert base in _alive, "the memory of a queued copy was given back"
        raw = (ctypes.c_char * _alive[base]).from_address(base)
        count = _alive[base] // dtype.itemsize
        found = (
            torch.frombuffer(raw, dtype=dtype, count=count) if count else memory((0,), dtype=dtype)
        )
        found = found.as_strided(shape, stride, offset)
        return found.conj() if conjugated else found

    return find


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    device = DEVICE

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.new_empty, torch.empty_like):
            shape = args[1] if func is torch.Tensor.new_empty else args[0].shape
            return _device_memory(shape, dtype=args[0].dtype)
        if func in (torch.Tensor.copy_, torch.Tensor.mul_, torch.Tensor.fill_):
            assert args[0].untyped_storage().data_ptr() in _alive, "no memory that it can write"
            operands = [_raw(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            assert func is not torch.Tensor.copy_ or kwargs == {"non_blocking": True}
            RUNTIME.current.queue.append(
                lambda: func(*(arg() if callable(arg) else arg for arg in operands))
            )
            return args[0]
        if func is torch.Tensor.resolve_conj and args[0].is_conj():
            resolved = _device_memory(args[0].shape, dtype=args[0].dtype)
            return resolved.copy_(args[0], non_blocking=True)
        return super().__torch_function__(func, types, args, kwargs)


def on_device(values: torch.Tensor) -> OnDevice:
    """A tensor of these values and strides, whose values are written late."""
    if values.is_conj():
        return on_device(values.conj()).conj()
    made = _device_memory((values.untyped_storage().nbytes(),), dtype=torch.uint8)
    made = made.view(values.dtype).as_strided(values.shape, values.stride())
    source = values.clone(memory_format=torch.preserve_format)
    find = _raw(made)
    RUNTIME.current.queue.append(lambda: find().copy_(source))
    return made


def read(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel sees that is queued on the current stream now."""
    assert type(tensor) is OnDevice
    seen = []
    find = _raw(tensor)
    RUNTIME.current.queue.append(lambda: seen.append(find().clone()))
    RUNTIME.current.run()
    return seen[0]
