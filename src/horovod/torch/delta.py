"""Optimizers that reduce what their step changes, with Adasum; must not know how data travels.

Adasum combines updates rather than gradients: each rank takes its own step, and the differences it
made to the parameters are combined (Maleki et al., arXiv:2006.02924, section 3.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod.common import ops
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet
from horovod.torch.names import prefix_for
from horovod.torch.ops import allreduce_async_
from horovod.torch.reducer import Options
from horovod.torch.wrapping import Wrapped


class DeltaOptimizer(Wrapped):
    """Steps on this rank's gradients, then combines the steps of all ranks."""

    def _distribute(self, names: dict[torch.Tensor, str], options: Options) -> None:
        super()._distribute(names, options)
        self.backward_passes_per_step = options.passes
        self._prefix = prefix_for(names.values())

    @property
    def op(self) -> ReduceOp:
        """How steps are combined."""
        options: Options = self._options
        return options.op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that combine their steps."""
        options: Options = self._options
        return options.process_set

    def synchronize(self) -> None:
        """Does nothing: there is nothing to wait for before ``step()``."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Is of no use here.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("skip_synchronize() makes no sense with op=Adasum: step() reduces")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the wrapped optimizer's step on each rank, and makes it Adasum of all of them.

        All ranks of the process set must call it; blocks until they have. How many backward passes
        come before is this rank's own affair.

        Args:
            closure: evaluates the model anew on this rank, once. An optimizer that evaluates it
                several times takes them all before the ranks combine.

        Returns:
            What the wrapped optimizer's step returns.

        Raises:
            HorovodInternalError: ranks disagree about a parameter, or a peer is lost.
        """
        if not self.process_set.included():
            return super().step(closure)
        parameters = [p for p in self._parameter_names if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        result: Any = super().step(closure)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.sub_(old)  # until the others' differences are there
            self._combine(parameters)
            for parameter, old in zip(parameters, before, strict=True):
                parameter.add_(old)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the hooks are those of the wrapped step

    def _combine(self, deltas: list[torch.Tensor]) -> None:
        compression: Any = self._options.compression
        handles = []
        finishers: list[Callable[[], None]] = []
        for delta in deltas:
            wire, context = compression.compress(delta.detach())
            name = self._prefix + self._parameter_names[delta]
            handles.append(
                allreduce_async_(wire, None, name, ReduceOp.Adasum, process_set=self.process_set)
            )
            finishers.append(functools.partial(self._finish, delta, wire, context))
        ops.synchronize_all(handles)
        for finish in finishers:
            finish()

    def _finish(self, delta: torch.Tensor, wire: torch.Tensor, context: Any) -> None:
        reduced = self._options.compression.decompress(wire, context)
        if reduced is not wire or wire.data_ptr() != delta.data_ptr():
            delta.copy_(reduced)
