"""Parameters and buckets of them within a window of passes; must not know when they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

UNSEEN, DENSE = -1, 0
"""Layouts of a gradient; a sparse one is its number of sparse dimensions."""


def _same(seen: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    if gradient is None or gradient.layout is not seen.layout:
        return False
    if torch.equal(seen, gradient):
        return True
    both_nan = seen.isnan() & gradient.isnan()  # NaN isn't equal to itself
    return bool(((seen == gradient) | both_nan).all())


@dataclass(eq=False, slots=True)
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
    seen: torch.Tensor | None = None  # a copy of what left early, or would have
    source: torch.Tensor | None = None  # what `seen` is a copy of, while `alone` is not known
    watched: bool = False  # has a hook for `reach`
    direct: bool = False  # the source was handed to the parameter as it was
    alone: bool | None = None
    """Whether what was seen has always been all that arrived; None: nothing was compared yet."""
    gradient: torch.Tensor | None = None  # what was submitted and will be, or is, reduced
    version: int = 0  # of `gradient` when it was submitted, then when it was reduced

    def reach(self, total: torch.Tensor) -> None:
        """Learns whether anything was added to the source on its way to the parameter.

        The penalty of a weight that is zero at first adds nothing to the values, and comes later.
        """
        source, self.source = self.source, None
        if source is not None:
            self.direct = total.data_ptr() == source.data_ptr()

    def compare(self) -> None:
        """Learns whether what was seen early is what has been accumulated; raises if it had left.

        In the end values tell: a compiled graph may add in place, and hooks change gradients.
        """
        seen, self.seen = self.seen, None
        if seen is None:
            return
        alone = self.direct if self.alone is None else self.alone
        self.alone = alone and _same(seen, self.parameter.grad)
        if self.early is not None and not self.alone:
            raise RuntimeError(
                f"gradient of {self.name} left early, and was not all that backward accumulated: "
                f"the parameter was used otherwise than in the first passes (several times, or "
                f"outside of the model). Train without hvd.overlap(), or use it alike in all passes"
            )

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


@dataclass(eq=False, slots=True)
class Bucket:
    """Slots whose gradients travel as one call."""

    slots: list[Slot] = field(default_factory=list)
    dense: bool = False  # all ranks know since the window's start that all its gradients are
    missing: int = 0  # gradients that have not arrived
    flight: Callable[[], Iterable[torch.Tensor]] | None = None
    """While the call is under way: waits for it, and gives the reduced gradients of `sent`."""
    sent: list[Slot] = field(default_factory=list)

    def restart(self) -> None:
        """Starts a new window."""
        if not self.dense:  # layouts once known don't change
            self.dense = all(slot.layout == DENSE for slot in self.slots)
        self.missing = len(self.slots)
        self.flight = None


def check_untouched(slots: list[Slot]) -> None:
    """Raises if a gradient was changed since it was noted."""
    changed = [slot.name for slot in slots if not slot.untouched()]
    if changed:
        raise RuntimeError(
            f"gradient of {', '.join(changed)} was changed or replaced while it was being reduced. "
            f"The end of backward waits only if every parameter had a gradient: call "
            f"optimizer.synchronize() before you use gradients, and step inside "
            f"`with optimizer.skip_synchronize():`"
        )
