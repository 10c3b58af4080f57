"""Starts the reduction of gradients inside a compiled backward pass; must not know how they travel.

The hooks of a compiled model run when its whole backward graph has. So each parameter passes
through an identity, whose gradient step calls an operator that offers the gradient to the reducer;
the operator has effects, so the compiler keeps it. Autograd runs what was made last first: the
identity is applied right before the module that uses the parameter, not at the top.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from horovod.torch import library
from horovod.torch.ops import TRACEABLE
from horovod.torch.reducer import Reducer

_keys = itertools.count()
_reducers: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


def _will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward pass that runs is going to add to the parameter's ``.grad``."""
    with torch.enable_grad():
        sink = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(sink))
    except RuntimeError:  # it gives this gradient to the caller of torch.autograd.grad
        return False


def _start(gradient: torch.Tensor, key: int, place: int) -> None:
    reducer = _reducers.get(key)
    if reducer is None or gradient.requires_grad or gradient.layout is not torch.strided:
        return
    parameter = reducer.parameters[place]
    if parameter.requires_grad and _will_accumulate(parameter):
        reducer.start_early(place, gradient)


if TRACEABLE:
    library.define("start", "Tensor gradient, int key, int place) -> ()", _start, lambda *_: None)


class _Start(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, key: int, place: int, parameter: torch.Tensor) -> torch.Tensor:
        ctx.key, ctx.place = key, place
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.ops.horovod.start(gradient, ctx.key, ctx.place)
        return None, None, gradient


class _Switch:
    """Whether an `Overlapped` is in its forward pass; its modules may run outside of it too."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.on = False


class _Before:
    """Passes a module's own parameters through the identity, right before it uses them.

    A copy of the module, deep or pickled, has one that does nothing.
    """

    def __init__(self, switch: _Switch, own: list[tuple[str, int]]) -> None:
        self.switch = switch
        self.own = own

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not self.switch.on:
            return
        for name, place in self.own:
            tensor = module._parameters[name]
            if tensor is not None and tensor.requires_grad:
                module._parameters[name] = _Start.apply(self.switch.key, place, tensor)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        return _Before, (_Switch(-1), [])


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class Overlapped(torch.nn.Module):
    """What `overlap` gives. `module` is the model itself; its attributes are reachable here too.

    The names of parameters, buffers and entries of the ``state_dict`` are those of the model.
    """

    def __init__(self, model: torch.nn.Module, reducer: Reducer) -> None:
        """Puts a hook before each module with parameters that are reduced."""
        super().__init__()
        self.module = model
        self._switch = _Switch(next(_keys))
        _reducers[self._switch.key] = reducer
        places = {parameter: i for i, parameter in enumerate(reducer.parameters)}
        self._names = [name for name, p in model.named_parameters() if p in places]
        handles = []
        for module in model.modules():
            own = [(name, places[p]) for name, p in module._parameters.items() if p in places]
            if own:
                handles.append(module.register_forward_pre_hook(_Before(self._switch, own)))
        weakref.finalize(self, _remove, handles).atexit = False
        self._register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        # Views, which the hooks may replace: the parameters themselves stay where they are.
        views = {}
        for name in self._names:
            parameter = self.module.get_parameter(name)
            views[name] = parameter.view_as(parameter)
        self._switch.on = True
        try:
            return torch.func.functional_call(self.module, views, args, kwargs)
        finally:
            self._switch.on = False

    def __getattr__(self, name: str) -> Any:
        """Looks here first, then in the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the model."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Those of the model, under their names there."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Those of the model, under their names there."""
        return self.module.named_buffers(*args, **kwargs)

    def _rename(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Lets a module around this one load what `state_dict` gave."""
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}module.{name[len(prefix) :]}"] = state.pop(name)


def overlap(model: torch.nn.Module, optimizer: Any) -> torch.nn.Module:
    """Wraps a model that is to be compiled, so that gradients travel while its backward runs.

    The hooks of a compiled model run at the end of its backward pass, so without this no reduction
    overlaps with it. Use the result in place of the model::

        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        compiled = torch.compile(hvd.overlap(model, optimizer))

    Results are the same with and without, compiled or not. The first window only watches: a
    parameter's gradient leaves early if what the model's backward made for it was then all that it
    got, bit for bit. So one that is used in several places, or in the loss besides, leaves at the
    end, as ever. What left early is compared each time, which costs a second copy of the gradient
    until the backward pass ends. Makes no call by itself.

    Args:
        model: those of its parameters that the optimizer has pass through an identity. Hooks are
            put on its modules and go when the result does; it may be used by itself too.
        optimizer: a `DistributedOptimizer` that reduces gradients. Wrap again after
            ``add_param_group``.

    Returns:
        A module that forwards to `model`, with its attributes, names and ``state_dict``.

    Raises:
        TypeError: `optimizer` is no `DistributedOptimizer`, or combines steps (``op=hvd.Adasum``).
        RuntimeError: torch is older than 2.4. Later, from a backward pass: a gradient that had left
            early was not all, since the model is used otherwise than in its first passes.
    """
    reducer = getattr(optimizer, "reducer", None)
    if not isinstance(reducer, Reducer):
        raise TypeError(
            f"overlap needs a DistributedOptimizer that reduces gradients, not "
            f"{type(optimizer).__name__}"
        )
    if not TRACEABLE:
        raise RuntimeError(f"overlap needs torch 2.4 or later, not {torch.__version__}")
    return Overlapped(model, reducer)
