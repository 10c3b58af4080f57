"""Reduces gradients while backward still runs; must not know how data travels."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from horovod.common import basics, ops
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import Call, ReduceOp
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compression
from horovod.torch.differentiable import allreduce
from horovod.torch.ops import Average, Compressing, submit
from horovod.torch.views import in_place


class _Registry:
    """Which optimizer reduces which parameter, and how often each set of names was used."""

    def __init__(self) -> None:
        self.owners: Any = WeakIdKeyDictionary()  # parameter -> weak reference to its optimizer
        self.uses: dict[tuple[str, ...], int] = {}

    def prefix(self, names: Iterable[str]) -> str:
        """Keeps apart the names of several optimizers over equally named parameters.

        Counts per set of names, so that an optimizer that only one rank has, say of a model for
        evaluation, doesn't shift the others. Ranks create equally named ones in the same order.
        """
        key = tuple(sorted(names))
        number = self.uses.get(key, 0)
        self.uses[key] = number + 1
        return f"optimizer{number}." if number else ""

    def claim(self, parameter: torch.Tensor, optimizer: _Distributed) -> None:
        """Makes `optimizer` the only one that reduces the parameter."""
        owner = self.owners.get(parameter, lambda: None)()
        if owner is not None and owner is not optimizer:
            owner._retire()
        self.owners[parameter] = weakref.ref(optimizer)


_registry = _Registry()


class _Distributed(torch.optim.Optimizer):
    """What is put in front of the class of the wrapped optimizer.

    A parameter's hook counts its backward passes down; at zero the reduction of its gradient starts
    in place. `synchronize` starts what is missing, so that ranks that use different parameters
    still make the same calls, and waits for all.
    """

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Compressing,
        backward_passes_per_step: int,
        op: ReduceOp,
        scales: tuple[float, float],
        process_set: ProcessSet,
    ) -> None:
        """Stands in for ``__init__``; the wrapped optimizer's attributes are there already."""
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.process_set = process_set
        self._compression = compression
        self._scales = scales
        self._parameter_names = _names(self.param_groups, named_parameters)
        self._prefix = _registry.prefix(self._parameter_names.values())
        self._allreduce_delay: dict[torch.Tensor, int] = {}  # backward passes until its reduction
        self._handles: dict[torch.Tensor, tuple[int, Any]] = {}  # in flight, with the context
        self._run = ops.run()  # that the handles belong to
        self._hooks: list[Any] = []
        self._synchronized = False
        self._skipping = False
        self._retired = False
        self._active = basics.size() > 1 and bool(process_set.included())
        self._watch()

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return set(self._allreduce_delay)

    def _watch(self) -> None:
        """Hooks the parameters that require gradients and have no hook yet."""
        if not self._active:
            return
        me = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer._on_gradient(parameter)

        for parameter in _parameters(self.param_groups):
            if parameter.requires_grad and parameter not in self._allreduce_delay:
                _registry.claim(parameter, self)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)
                self._allreduce_delay[parameter] = self.backward_passes_per_step

    def _retire(self) -> None:
        """Another optimizer reduces the parameters now."""
        for hook in self._hooks:
            hook.remove()
        self._forget()
        self._allreduce_delay.clear()
        self._retired = True

    def _forget(self) -> None:
        """Waits out what is in flight and starts a new window of backward passes."""
        self._drop_stale()
        try:
            ops.synchronize_all(handle for handle, _ in self._handles.values())
        except HorovodInternalError as error:  # elastic training loads state because of it
            logging.getLogger("horovod").info("gradients in flight were lost: %s", error)
        self._handles.clear()
        self._synchronized = False
        self._restart_window()

    def _drop_stale(self) -> None:
        """Forgets handles of an engine before the present one."""
        if self._handles and self._run != ops.run():
            self._handles.clear()
            self._restart_window()

    def _restart_window(self) -> None:
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self.backward_passes_per_step

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        name = self._parameter_names[parameter]
        self._drop_stale()
        if parameter in self._handles:
            raise AssertionError(
                f"gradient of {name} was computed more than backward_passes_per_step="
                f"{self.backward_passes_per_step} times before step() or synchronize(): "
                f"the reduction has started. Raise backward_passes_per_step, or step more often"
            )
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise AssertionError(
                f"gradient of {name} requires a gradient: create_graph can't be used"
            )
        self._allreduce_delay[parameter] -= 1
        if self._allreduce_delay[parameter] <= 0:
            self._start(parameter)

    def _start(self, parameter: torch.Tensor) -> None:
        """Starts the reduction of one gradient; a missing one counts as zeros."""
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
            if parameter.requires_grad:  # a parameter frozen since stays without, as in plain torch
                parameter.grad = gradient
        name = self._prefix + self._parameter_names[parameter]
        with Call(ops.ALLREDUCE, name, self.process_set) as call:
            wire, context = self._compression.compress(gradient)
            handle = submit(
                call,
                (wire,),
                in_place,
                reduce_op=self.op,
                prescale=self._scales[0],
                postscale=self._scales[1],
            )
        self._handles[parameter] = (handle, context)
        self._run = ops.run()

    def synchronize(self) -> None:
        """Waits until every gradient is reduced, and starts those that are not under way.

        ``step()`` does it by itself. Call it to look at or clip reduced gradients, and then step
        inside `skip_synchronize`. All ranks of the process set must call it.

        Raises:
            HorovodInternalError: ranks disagree about a gradient, or a peer is lost.
            RuntimeError: another DistributedOptimizer was made over the same parameters.
        """
        if self._retired:
            raise RuntimeError(
                "another DistributedOptimizer was made over the same parameters: use that"
            )
        self._watch()
        self._drop_stale()
        first: Exception | None = None
        for parameter in self._allreduce_delay:
            if parameter not in self._handles:
                try:
                    self._start(parameter)
                except (ValueError, HorovodInternalError) as error:
                    first = first or error
        # The others wait for every name, and every handle is ours to finish: errors come last.
        for parameter, (handle, context) in self._handles.items():
            try:
                reduced = self._compression.decompress(ops.synchronize(handle), context)
            except (ValueError, HorovodInternalError) as error:
                first = first or error
            else:
                if parameter.grad is not None and reduced is not parameter.grad:
                    parameter.grad.copy_(reduced)
        self._handles.clear()
        self._restart_window()
        if first is not None:
            raise first
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside it ``step()`` takes the gradients as they are, after an own `synchronize`."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces the gradients and takes the wrapped optimizer's step.

        Args:
            closure: evaluates the model anew, as for the wrapped optimizer. The gradients of every
                evaluation are reduced, and the optimizer sees the mean loss, so that all ranks
                decide alike.

        Returns:
            What the wrapped optimizer's step returns.
        """
        if closure is not None and not self._skipping:
            if self._handles:
                self.synchronize()
            result: Any = super().step(functools.partial(self._evaluate, closure))
        else:
            if not self._skipping:
                if self._synchronized:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() context "
                        "after optimizer.synchronize(): the gradients are reduced again. Use "
                        "`with optimizer.skip_synchronize(): optimizer.step()`",
                        stacklevel=2,
                    )
                self.synchronize()
            result = super().step(closure)
        self._synchronized = False
        return result

    # torch wraps the steps of classes that lack this mark, to run step hooks; the wrapped class's
    # step has been wrapped, and the hooks of one step shall run once, on reduced gradients.
    step.hooked = True  # type: ignore[attr-defined]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        if loss is None or not self._active:
            return loss
        mean = allreduce(
            torch.as_tensor(loss).detach(),
            name=f"{self._prefix}loss",
            op=Average,
            process_set=self.process_set,
        )
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forgets the gradients, as the wrapped optimizer does; the arguments are its own.

        Raises:
            AssertionError: a gradient is being reduced.
        """
        self._drop_stale()
        if self._handles:
            raise AssertionError(
                "zero_grad() was called between backward() and step() or synchronize(), "
                "while gradients are being reduced"
            )
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes go into one step, from the next window on.

        Args:
            passes: at least 1, the same on all ranks.
        """
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
        self.backward_passes_per_step = passes
        self._restart_window()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as for the wrapped optimizer; their gradients are reduced too."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        self._parameter_names.update(_generated_names(index, self.param_groups[index]["params"]))
        self._watch()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of the wrapped optimizer; waits for gradients in flight first."""
        self._forget()
        super().load_state_dict(state_dict)


def _parameters(groups: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _generated_names(index: int, parameters: list[torch.Tensor]) -> dict[torch.Tensor, str]:
    return {p: f"allreduce.noname.{index}.{i}" for i, p in enumerate(parameters)}


def _names(
    groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """The name of each parameter, unique, the same on all ranks."""
    if named_parameters is None:
        names: dict[torch.Tensor, str] = {}
        for index, group in enumerate(groups):
            names.update(_generated_names(index, group["params"]))
        return names
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError(
            "named_parameters must hold (name, parameter), as model.named_parameters()"
        )
    twice = [name for name, uses in Counter(name for name, _ in named).items() if uses > 1]
    if twice:
        raise ValueError(f"named_parameters has several parameters of the name {', '.join(twice)}")
    names = {parameter: name for name, parameter in named}
    missing = sum(parameter not in names for parameter in _parameters(groups))
    if missing:
        raise ValueError(f"named_parameters lacks {missing} of the optimizer's parameters")
    return names


@functools.cache
def _distributed_class(wrapped: Any) -> type[_Distributed]:
    doc = f"A `{wrapped.__module__}.{wrapped.__qualname__}` that reduces gradients over ranks."
    namespace = {"__module__": __name__, "__doc__": doc}
    return type(wrapped.__name__, (_Distributed, wrapped), namespace)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressing = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that its steps use gradients reduced over all ranks.

    The reduction of each gradient starts in backward as soon as it is there, and overlaps with the
    rest of it. Parameters that a rank did not use count as zeros. All ranks must wrap optimizers
    over equal parameters, in the same order if several have equal parameter names.

    Args:
        optimizer: any `torch.optim.Optimizer`. Its state, options and hooks are taken over; use the
            result from here on.
        named_parameters: ``model.named_parameters()``, for names in messages and traces.
        compression: what to do to gradients for the way, see `Compression`.
        backward_passes_per_step: backward passes whose gradients add up, undivided, before they are
            reduced. A ``step()`` before that reduces what there is.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: divides gradients by this before they are summed and multiplies
            after, to keep them in range; with Average only.
        num_groups: deprecated, see `groups`.
        groups: not supported yet; gradients are fused without it.
        sparse_as_dense: not supported yet.
        process_set: the ranks that reduce; elsewhere the result is a plain local optimizer.

    Returns:
        An instance of a class derived from that of `optimizer`, with `synchronize`,
        `skip_synchronize` and `set_backward_passes_per_step` besides.

    Raises:
        ValueError: an argument is wrong, names are missing or doubled, or init() was not called.
    """
    chosen = ops.reduce_op(op, None)
    if gradient_predivide_factor != 1.0 and chosen != Average:
        raise ValueError("gradient_predivide_factor works with op=Average only")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}"
        )
    if chosen == ReduceOp.Adasum:
        raise ValueError("op=Adasum is not supported yet")
    if groups is not None:
        raise ValueError("groups is not supported yet; gradients are fused without it")
    if sparse_as_dense:
        raise ValueError("sparse_as_dense is not supported yet")
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")

    kind: Any = type(optimizer)
    wrapper = _distributed_class(kind)
    distributed = wrapper.__new__(wrapper)
    # An attribute that stands for a method, such as the step that a scheduler replaced, is the
    # wrapped instance's own.
    own = {key: value for key, value in vars(optimizer).items() if key not in vars(_Distributed)}
    vars(distributed).update(own)
    if "step" in vars(optimizer):
        # A scheduler that watches the wrapped optimizer must not miss the steps taken here.
        vars(optimizer)["_opt_called"] = True
    distributed._distribute(
        named_parameters,
        compression,
        backward_passes_per_step,
        chosen,
        (1.0 / gradient_predivide_factor, gradient_predivide_factor),
        process_set,
    )
    return distributed
