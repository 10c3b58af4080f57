"""Optimizers that reduce what their step changes, with Adasum; must not know how data travels.

Adasum combines updates rather than gradients: each rank takes its own step, and the differences it
made to the parameters are combined (Maleki et al., arXiv:2006.02924, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from horovod.common import ops
from horovod.common.compression import bound
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet
from horovod.torch.flights import Options
from horovod.torch.ops import allreduce_async_
from horovod.torch.wrapping import Wrapped


class DeltaOptimizer(Wrapped):
    """Steps on this rank's gradients, then combines the steps of all ranks."""

    def _distribute(self, names: dict[torch.Tensor, str], options: Options) -> None:
        super()._distribute(names, options)
        self.backward_passes_per_step = options.passes

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

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Notes how many passes come before a step; nothing depends on it."""
        self.backward_passes_per_step = passes

    def no_sync(self) -> AbstractContextManager[None]:
        """Changes nothing: backward passes send nothing."""
        return nullcontext()

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
            deltas = [p - old for p, old in zip(parameters, before, strict=True)]
            try:
                self._combine(parameters, deltas)
            except Exception:
                for parameter, old in zip(parameters, before, strict=True):
                    parameter.copy_(old)  # no rank has taken the step
                raise
            for parameter, old, delta in zip(parameters, before, deltas, strict=True):
                parameter.copy_(old.add_(delta))
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the hooks are those of the wrapped step

    def _combine(self, parameters: list[torch.Tensor], deltas: list[torch.Tensor]) -> None:
        """Makes each delta Adasum of all ranks'."""
        sent: list[tuple[torch.Tensor, Any, torch.Tensor, Any]] = []
        handles = []
        errors: list[Exception] = []
        for parameter, delta in zip(parameters, deltas, strict=True):
            name = f"{self._prefix}{self._parameter_names[parameter]}"
            compressor = bound(self._options.compression, name)
            try:
                wire, context = compressor.compress(delta)
                handle = allreduce_async_(
                    wire, name=name, op=ReduceOp.Adasum, process_set=self.process_set
                )
            except Exception as error:  # the others wait for every name
                errors.append(error)
            else:
                handles.append(handle)
                sent.append((delta, compressor, wire, context))
        try:
            ops.synchronize_all(handles)
        except (HorovodInternalError, ValueError) as error:
            errors.append(error)
        if errors:
            raise errors[0]
        for delta, compressor, wire, context in sent:
            reduced = compressor.decompress(wire, context)
            if reduced is not delta:
                delta.copy_(reduced)
