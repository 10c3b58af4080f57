"""Weights gradients by what they are means over; must not know how they travel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from horovod.torch.window import Slot


class Weights:
    """What this rank's backward passes of a window count for.

    Each gradient is multiplied before it is accumulated. A pass is known by how many gradients its
    parameter has had in the window, so that parameters that are used in some passes only, and
    backward passes inside backward passes, don't count twice.
    """

    def __init__(self) -> None:
        self.current: float | None = None  # of the next pass; None: ranks are equal
        self.total: torch.Tensor | None = None  # 1 float64; over ranks, once that is under way
        self._passes: dict[int, float] = {}

    def restart(self) -> None:
        """Starts a new window."""
        self._passes.clear()
        self.total = None

    def watch(self, slot: Slot) -> Any:
        """Weights the parameter's gradients from here on; gives what removes that again."""
        me = weakref.ref(self)

        def weigh(gradient: torch.Tensor) -> torch.Tensor | None:
            weights = me()
            if weights is None or weights.current is None:
                return None
            weighted = weights.weighted(slot, gradient)
            slot.weighed += 1
            return weighted

        slot.weighing = True
        return slot.parameter.register_hook(weigh)  # type: ignore[no-untyped-call]

    def weighted(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """The parameter's gradient of the present pass as it counts."""
        if self.current is None:
            return gradient.clone()
        self._passes.setdefault(slot.weighed, self.current)
        # A mean over no samples may be NaN.
        return gradient * self.current if self.current else torch.zeros_like(gradient)

    def start(self) -> torch.Tensor:
        """This rank's share of `total`, which it becomes once it is reduced in place."""
        self.total = torch.tensor([sum(self._passes.values())], dtype=torch.float64)
        return self.total

    def share(self) -> float:
        """This rank's part of `total`, once that is reduced."""
        assert self.total is not None
        return sum(self._passes.values()) / (self.total.item() or 1.0)

    def divide(self, slots: Iterable[Slot]) -> None:
        """Turns weighted sums into means; all stay zero where no rank had anything."""
        assert self.total is not None
        total = self.total.item()
        if total == 0.0:
            return
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is not None and not slot.unused:
                with torch.no_grad():
                    gradient.div_(total)
                slot.note()
