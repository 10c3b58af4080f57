"""Optimizers whose steps use gradients of all ranks; must not know how gradients are reduced."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from horovod.common import basics, ops
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compression
from horovod.torch.delta import DeltaOptimizer
from horovod.torch.flights import Options
from horovod.torch.names import names_of, parameters_of
from horovod.torch.ops import Average, Compressing
from horovod.torch.reducer import Reducer, in_backward
from horovod.torch.wrapping import Wrapped, take_over


class _Distributed(Wrapped):
    """Takes the wrapped optimizer's steps with reduced gradients."""

    reducer: Reducer = None  # type: ignore[assignment]  # the name is taken

    def _distribute(self, names: dict[torch.Tensor, str], options: Options) -> None:
        super()._distribute(names, options)
        self.reducer = Reducer(names, self._prefix, options)
        self._asked = False  # the user has called synchronize() since the last step
        self._skipping = False
        self.reducer.attach()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups.

        Whoever looks at them between backward and step is about to use gradients, as
        ``GradScaler.unscale_`` does: what is in flight is completed first.
        """
        reducer = vars(self).get("reducer")
        if reducer is not None and reducer.started and not in_backward():
            reducer.complete()
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``GradScaler.step`` asks before it looks at gradients, and may skip the step."""
        self.reducer.complete()
        return bool(vars(self).get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = supports

    @property
    def op(self) -> ReduceOp:
        """How gradients are reduced."""
        return self.reducer.options.op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce."""
        return self.reducer.options.process_set

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes add up before gradients are reduced."""
        return self.reducer.passes

    @property
    def weight(self) -> float | None:
        """What the gradients of this rank's next backward passes count for, None for equal ranks.

        A number of at least 0, usually of the samples or tokens the loss is a mean over. Set it
        before each backward pass, or once; on all ranks of the process set. Gradients are
        multiplied by it and divided by the sum over all ranks and passes of the step, so that
        uneven batches give what one process would on all of them. With op=Average only.
        """
        return self.reducer.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self.reducer.weight = weight

    # What tools and tests read, with `_parameter_names`.

    @property
    def _handles(self) -> dict[torch.Tensor, Any]:
        return self.reducer.in_flight()

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        return self.reducer.delays()

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return set(self.reducer.delays())

    def synchronize(self) -> None:
        """Waits until every gradient is reduced, and starts those that are not under way.

        ``step()`` does it by itself, and the end of ``backward()`` too if every parameter had a
        gradient: then gradients can be clipped or looked at before ``step()``, as without horovod.
        Otherwise call this before, and then step inside `skip_synchronize`. All ranks of the
        process set must call it.

        Raises:
            HorovodInternalError: ranks disagree about a gradient, or a peer is lost.
            RuntimeError: another DistributedOptimizer was made over the same parameters, or a
                gradient was changed while it was being reduced.
        """
        self.reducer.complete()
        self._asked = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside it ``step()`` takes the gradients as they are, after an own `synchronize`."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it backward passes only add to the gradients of this rank.

        They are reduced with those of the next pass outside. All ranks must make as many passes
        outside; how many are made inside is their own affair.
        """
        return self.reducer.no_sync()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces the gradients and takes the wrapped optimizer's step.

        Args:
            closure: evaluates the model anew, as for the wrapped optimizer. The gradients of every
                evaluation are reduced, and the optimizer sees the mean loss, so that all ranks
                decide alike.

        Returns:
            What the wrapped optimizer's step returns.
        """
        reducer = self.reducer
        if self._skipping:
            result: Any = super().step(closure)
        elif closure is not None:
            if reducer.busy():
                reducer.complete()
            reducer.restart()
            result = super().step(functools.partial(self._evaluate, closure))
        else:
            if self._asked:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context "
                    "after optimizer.synchronize(): the gradients are reduced again. Use "
                    "`with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
                reducer.restart()
            reducer.complete()
            result = super().step()
        self._asked = False
        reducer.restart()
        return result

    # torch wraps the steps of classes that lack this mark, to run step hooks; the wrapped class's
    # step has been wrapped, and the hooks of one step shall run once, on reduced gradients.
    step.hooked = True  # type: ignore[attr-defined]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        reducer = self.reducer
        reducer.complete()
        mean = loss
        if reducer.delays():
            if isinstance(loss, torch.Tensor):
                mean = reducer.mean_of(loss.detach())
            elif isinstance(loss, (int, float)):
                mean = reducer.mean_of(torch.tensor(loss, dtype=torch.float64)).item()
        reducer.restart()  # the next evaluation is a window of its own
        return mean

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forgets the gradients, as the wrapped optimizer does; the arguments are its own.

        Raises:
            AssertionError: a gradient is being reduced.
        """
        if self.reducer.busy():
            raise AssertionError(
                "zero_grad() was called between backward() and step() or synchronize(), "
                "while gradients are being reduced"
            )
        self._asked = False
        self.reducer.drop()
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes go into one step, from the next window on.

        Args:
            passes: at least 1, the same on all ranks.
        """
        self.reducer.passes = _checked_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as for the wrapped optimizer; their gradients are reduced too."""
        super().add_param_group(param_group)
        self.reducer.attach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of the wrapped optimizer; waits for gradients in flight first."""
        self.reducer.forget()
        super().load_state_dict(state_dict)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressing = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    skip_unused_parameters: bool = False,
) -> Any:
    """Wraps an optimizer so that its steps use gradients reduced over all ranks.

    The reduction of each gradient starts in backward as soon as it is there, and overlaps with the
    rest of it. Parameters that a rank did not use count as zeros. All ranks must wrap optimizers
    over equal parameters, in the same order if several have equal parameter names.

    If every parameter had a gradient, the end of ``backward()`` waits for the reductions, so that
    ``backward(); clip_grad_norm_(); step()`` and ``torch.amp.GradScaler`` work as in one process.
    Otherwise ``step()`` waits; call `synchronize` to use gradients before it.

    Args:
        optimizer: any `torch.optim.Optimizer`. Its state, options and hooks are taken over; use the
            result from here on.
        named_parameters: ``model.named_parameters()``, for names in messages and traces.
        compression: what to do to gradients for the way, see `Compression`.
        backward_passes_per_step: backward passes whose gradients add up, undivided, before they are
            reduced. A ``step()`` before that reduces what there is.
        op: Average, Sum, Min, Max or Product; Adasum reduces what the wrapped optimizer's step
            changes, instead of gradients.
        gradient_predivide_factor: divides gradients by this before they are summed and multiplies
            after, to keep them in range; with Average only.
        num_groups: deprecated, see `groups`.
        groups: gradients that travel together: how many groups to make of all parameters, in their
            order, or the parameters of each; the same on all ranks. Small gradients are fused
            without it.
        sparse_as_dense: sparse gradients travel as dense ones. Otherwise the rows of all ranks do.
        process_set: the ranks that reduce; elsewhere the result is a plain local optimizer.
        skip_unused_parameters: a parameter without a gradient on any rank keeps ``grad`` None, so
            that weight decay and momentum leave it alone; otherwise its gradient is zero. Costs one
            small collective a step.

    Returns:
        An instance of a class derived from that of `optimizer`, with `synchronize`,
        `skip_synchronize`, `no_sync`, `weight` and `set_backward_passes_per_step` besides. With
        Adasum it has no `weight`, and `skip_synchronize` raises AssertionError.

    Raises:
        ValueError: an argument is wrong, names are missing or doubled, `optimizer` has an attribute
            of a name that the result uses for another purpose, or init() was not called.
    """
    several = basics.size() > 1  # without init() each rank would train alone, in silence
    chosen = ops.reduce_op(op, None)
    if gradient_predivide_factor != 1.0 and chosen != Average:
        raise ValueError("gradient_predivide_factor works with op=Average only")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _checked_passes(backward_passes_per_step)
    if isinstance(optimizer, Wrapped):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    names = names_of(optimizer.param_groups, named_parameters)
    options = Options(
        compression,
        backward_passes_per_step,
        chosen,
        gradient_predivide_factor,
        _grouping(groups, names, optimizer),
        sparse_as_dense,
        skip_unused_parameters,
        process_set,
    )
    adasum = chosen == ReduceOp.Adasum and several
    return take_over(optimizer, DeltaOptimizer if adasum else _Distributed, names, options)


def _checked_passes(passes: int) -> int:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes


def _grouping(
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    names: dict[torch.Tensor, str],
    optimizer: torch.optim.Optimizer,
) -> int | tuple[tuple[str, ...], ...] | None:
    """`groups` by names, which a copy of the optimizer understands too."""
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups must be at least 1, or lists of parameters, not {groups}")
        return groups
    known = set(parameters_of(optimizer.param_groups))
    seen: set[torch.Tensor] = set()
    for parameter in [p for group in groups for p in group]:
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(f"groups holds a {type(parameter).__name__}, not a parameter")
        if parameter in seen:
            raise ValueError(f"groups has {names.get(parameter, 'a parameter')} twice")
        if parameter not in known:
            raise ValueError("groups has a parameter that the optimizer doesn't have")
        seen.add(parameter)
    return tuple(tuple(names[p] for p in group) for group in groups)
