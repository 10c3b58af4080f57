"""Parameters and buckets of them within a window of passes; must not know when they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

UNSEEN, DENSE = -1, 0
"""Layouts of a gradient; a sparse one is its number of sparse dimensions."""


@dataclass(eq=False)
class Slot:
    """One parameter, and how far its gradient is in this window."""

    parameter: torch.Tensor
    name: str
    bucket: Bucket
    compressor: Any
    passes_left: int
    layout: int = UNSEEN
    """What some rank has shown; the same on all ranks, since they learn it from each other."""
    hooked: bool = False
    expected: bool = False  # the end of backward waits for it
    arrived: bool = False
    unused: bool = False  # no rank has a gradient: none travels
    weighed: int = 0  # passes whose gradient was weighted
    early: torch.Tensor | None = None  # the copy that travels, if it left before it arrived
    gradient: torch.Tensor | None = None  # what was submitted and will be, or is, reduced
    version: int = 0  # of `gradient` when it was submitted, then when it was reduced

    def note(self) -> None:
        """Remembers the gradient as it is now."""
        gradient = self.gradient = self.parameter.grad
        self.version = 0 if gradient is None else gradient._version

    def untouched(self) -> bool:
        """Whether the gradient is what it was when it was noted."""
        gradient = self.gradient
        return self.parameter.grad is gradient and (
            gradient is None or gradient._version == self.version
        )


@dataclass(eq=False)
class Bucket:
    """Slots whose gradients travel as one call."""

    slots: list[Slot] = field(default_factory=list)
    missing: int = 0  # gradients that have not arrived
    flight: Callable[[], Iterable[torch.Tensor]] | None = None
    """While the call is under way: waits for it, and gives the reduced gradients of `sent`."""
    sent: list[Slot] = field(default_factory=list)

    def is_dense(self) -> bool:
        """Whether all ranks know that all its gradients are."""
        return all(slot.layout == DENSE for slot in self.slots)


def check_untouched(slots: list[Slot]) -> None:
    """Raises if a gradient was changed since it was noted."""
    changed = ", ".join(slot.name for slot in slots if not slot.untouched())
    if changed:
        raise RuntimeError(
            f"gradient of {changed} was changed or replaced while it was being reduced. The end of "
            f"backward waits only if every parameter had a gradient: call optimizer.synchronize() "
            f"before you use gradients, and step inside `with optimizer.skip_synchronize():`"
        )
