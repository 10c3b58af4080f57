"""Copies tensors between accelerators and pinned host memory; must not know what is done to them.

The engine reads and writes host memory, so a tensor of an accelerator is staged: copied to the host
when a call is submitted and back when it is synchronized. Ordering is by streams alone: no copy to
the host overtakes what the program has queued before the call, and no work that it queues after
`synchronize` overtakes a copy back. Host memory lives until the copies that use it are done.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Staging(Protocol):
    """How the tensors of one kind of device get to the host and back."""

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """The values in row-major order, and a function that blocks until they are there.

        Gives the tensor itself, and not a copy, if that is on the host in row-major order.
        """

    def overwrite(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copies values from the host into a tensor of the device."""

    def place(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Values of the host in a new tensor on the device of `like`."""


def at_once() -> None:
    """Waits for nothing."""


class Host:
    """The host itself; what is there already is not copied."""

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """As `Staging.to_host`."""
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor, at_once
        return tensor.resolve_conj().resolve_neg().contiguous(), at_once

    def overwrite(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """As `Staging.overwrite`."""
        target.copy_(host)

    def place(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The tensor that was given."""
        return host


class Runtime(Protocol):
    """The part of ``torch.cuda`` that staging needs; other accelerators offer the same."""

    def Stream(self, device: torch.device) -> Any:
        """A new stream, with ``wait_event``."""

    def Event(self, *, blocking: bool) -> Any:
        """A new event, with ``record(stream)``, ``query`` and ``synchronize``."""

    def current_stream(self, device: torch.device) -> Any:
        """The stream on which the caller's next kernel would run."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes the stream the current one of its device, and that device the current one."""


class Accelerator:
    """One kind of device, any number of which are used in one process. Thread-safe.

    Args:
        runtime: its streams and events.
        pinned: makes host memory that the device copies from and to by itself.
    """

    def __init__(self, runtime: Runtime, pinned: Callable[..., torch.Tensor]) -> None:
        self._runtime = runtime
        self._pinned = pinned
        self._lock = threading.Lock()
        self._streams: dict[torch.device, Any] = {}
        self._copying: list[tuple[Any, tuple[torch.Tensor, ...]]] = []

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Starts a copy into new host memory, in row-major order; doesn't wait.

        It is queued behind what is on the current stream of the tensor's device, but on a stream of
        its own, so that kernels queued later don't wait for it.

        Returns:
            The host tensor, and a function that blocks until that holds the values.
        """
        # What a conjugated or negated view means is made on the device: a host tensor can't wait
        source = tensor.resolve_conj().resolve_neg()
        host = self._pinned(source.shape, dtype=source.dtype)
        ready = self._runtime.Event(blocking=True)
        ready.record(self._runtime.current_stream(source.device))
        side = self._side_stream(source.device)
        side.wait_event(ready)
        with self._runtime.stream(side):
            host.copy_(source, non_blocking=True)
        return host, self._keep_until_done(side, host, source).synchronize

    def overwrite(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Queues a copy on the current stream of the target's device; doesn't wait."""
        target.copy_(host, non_blocking=True)
        self._keep_until_done(self._runtime.current_stream(target.device), host)

    def place(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A new tensor, with a copy into it queued on the current stream of its device."""
        placed = like.new_empty(host.shape, requires_grad=False)
        self.overwrite(placed, host)
        return placed

    def _side_stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self._runtime.Stream(device)
            return self._streams[device]

    def _keep_until_done(self, stream: Any, *tensors: torch.Tensor) -> Any:
        """An event behind what is on the stream; the tensors live until it has happened."""
        done = self._runtime.Event(blocking=True)
        done.record(stream)
        with self._lock:
            self._copying = [(event, kept) for event, kept in self._copying if not event.query()]
            self._copying.append((done, tensors))
        return done


_STAGING: dict[str, Staging] = {
    "cpu": Host(),
    "cuda": Accelerator(torch.cuda, functools.partial(torch.empty, pin_memory=True)),
}


def staging(tensor: torch.Tensor) -> Staging:
    """The way to the host and back for the tensor's device.

    Raises:
        ValueError: none is known for this kind of device.
    """
    known = _STAGING.get(tensor.device.type)
    if known is None:
        raise ValueError(f"a tensor on {tensor.device} is not supported: pass tensor.cpu()")
    return known
