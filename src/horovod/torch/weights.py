"""Weights gradients by what they are means over; must not know how they travel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod.torch.window import Slot


class Weights:
    """What this rank's backward passes of a window count for.

    Each gradient is multiplied before it is accumulated. A pass is known by how many gradients its
    parameter has had in the window, so that parameters that are used in some passes only, and
    backward passes inside backward passes, don't count twice; setting the weight begins a new one.
    """

    def __init__(self) -> None:
        self.current: float | None = None  # of the next pass; None: ranks are equal
        self.total: torch.Tensor | None = None  # 1 float64; over ranks, once that is under way
        self._passes: list[float] = []
        self._first = 0  # pass of the window that the current weight was set for
        # Nothing that a parameter refers to may hold its node, whose hold on it the collector of
        # garbage can't see; nor does torch hold the node.
        self._watched: dict[Slot, tuple[Any, ...]] = {}

    def set(self, weight: float | None) -> None:
        """Weights the passes from here on."""
        self.current = weight
        self._first = len(self._passes)

    def restart(self) -> None:
        """Starts a new window."""
        self._passes.clear()
        self._first = 0
        self.total = None

    def watch(self, slot: Slot, before: Callable[[], None]) -> None:
        """Weights the parameter's gradients from here on.

        Args:
            slot: the parameter's.
            before: is called before each gradient.
        """
        parameter = slot.parameter
        kind = parameter.dtype, parameter.device  # with these torch changes the node
        if slot in self._watched and self._watched[slot][:2] == kind:
            return
        me = weakref.ref(self)

        def weigh(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            weights = me()
            if weights is None or weights.current is None:
                return None
            before()
            weighted = weights.weighted(slot, gradients[0])
            slot.weighed = weights._pass_of(slot) + 1
            return (weighted,)

        if self._passes and slot not in self._watched:
            # Unfrozen since: the passes until now had one weight.
            _scale(slot, sum(self._passes) / len(self._passes))
            slot.weighed = len(self._passes)
        # A hook of the parameter would also change what torch.autograd.grad() returns, which is
        # part of losses; this node runs only where gradients are accumulated.
        with torch.enable_grad():
            node: Any = parameter.view_as(parameter).grad_fn
        accumulator = node.next_functions[0][0]
        self._watched[slot] = (*kind, accumulator, accumulator.register_prehook(weigh))

    def unwatch(self) -> None:
        """Leaves all gradients as they are from here on."""
        for *_, hook in self._watched.values():
            hook.remove()
        self._watched.clear()

    def weighted(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """The parameter's gradient of the present pass as it counts."""
        if self.current is None:
            return gradient.clone()
        if self._pass_of(slot) == len(self._passes):
            self._passes.append(self.current)
        # A mean over no samples may be NaN.
        return gradient * self.current if self.current else torch.zeros_like(gradient)

    def _pass_of(self, slot: Slot) -> int:
        return max(slot.weighed, self._first)

    def settle(self, slots: Iterable[Slot]) -> None:
        """Weights what no pass of the window has accumulated, such as gradients set by hand."""
        if self._passes:
            for slot in slots:
                if not slot.weighed:
                    _scale(slot, sum(self._passes))

    def start(self) -> torch.Tensor:
        """This rank's part of `total`, which it becomes once it is reduced in place."""
        self.total = torch.tensor([sum(self._passes)], dtype=torch.float64)
        return self.total

    def share(self) -> float | None:
        """This rank's part of all that counts; None if ranks are equal, or none made a pass."""
        total = 0.0 if self.total is None else self.total.item()
        return sum(self._passes) / total if total else None

    def divide(self, slots: Iterable[Slot], size: int) -> None:
        """Turns sums over `size` ranks into means, equal ones where no rank made a pass."""
        assert self.total is not None
        total = self.total.item() or size
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is not None and not slot.unused:
                with torch.no_grad():
                    gradient.div_(total)
                slot.note()


def _scale(slot: Slot, factor: float) -> None:
    gradient = slot.parameter.grad
    if gradient is not None:
        with torch.no_grad():
            # A mean over no samples may be NaN.
            _ = gradient.mul_(factor) if factor else gradient.zero_()
