"""The base of distributed Keras optimizers: reduces before a step; must not know which Keras.

A wrapped optimizer is the object that was given, its class replaced by one that derives from a
`Distributed` and from the class it had. All that it had, slots and hyper-parameters and whoever
refers to it, stays as it was; nothing is built from a config, so custom schedules need none. Unlike
Horovod 0.28, which made another optimizer, nobody can go on with the one that doesn't reduce.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from horovod._keras import flavours
from horovod._keras.settings import Settings
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet

Gradient = Any

_STATE = "_horovod_state"
_MODULES = {"tensorflow": "horovod._keras.on_tensorflow", "torch": "horovod._keras.on_torch"}

_reduced_outside = contextvars.ContextVar("_reduced_outside", default=False)
"""Whether the step of an optimizer around this one is under way, which has reduced."""


@contextmanager
def reduced_outside() -> Iterator[None]:
    """Inside it distributed optimizers take gradients as they are."""
    token = _reduced_outside.set(True)
    try:
        yield
    finally:
        _reduced_outside.reset(token)


def backend(name: str) -> Any:
    """The module that knows the tensors of a backend.

    Raises:
        NotImplementedError: no front end works on them.
    """
    if name not in _MODULES:
        raise NotImplementedError(
            f"Keras works on the backend {name} here, for which horovod has no front end yet. Set "
            f"KERAS_BACKEND to tensorflow or torch before Keras is imported"
        )
    return importlib.import_module(_MODULES[name])


class CallableList(list[Any]):
    """A list that may be called for itself: ``optimizer.variables`` is either, by version."""

    def __call__(self) -> CallableList:
        """Gives the list itself."""
        return self


class State:
    """What a distributed optimizer has besides; one object, so that Keras doesn't track it."""

    def __init__(self, optimizer: Any, settings: Settings) -> None:
        self.owner = id(optimizer)
        self.settings = settings
        self.backend = backend(flavours.backend_of(optimizer))
        calls = f"Distributed{type(optimizer).__name__}"
        if settings.name is not None:
            calls += f".{settings.name}"
        self.reduce = self.backend.reducer(calls, settings)
        several = settings.backward_passes_per_step > 1
        self.window: Any = self.backend.Window(settings) if several else None
        self.handed_out = False  # reduced gradients, since the last step
        self.local: list[Any] = []
        self._local_keys: set[Hashable] = set()

    def add_local(self, variable: Any) -> None:
        """Makes a variable one that only this rank has."""
        self.local.append(variable)
        self._local_keys.update(flavours.keys(variable))

    def is_local(self, variable: Any) -> bool:
        """Whether only this rank has a variable."""
        return not self._local_keys.isdisjoint(flavours.keys(variable)) if self.local else False

    def share_local(self, other: State) -> None:
        """Has the local variables of another state, also those that are registered later."""
        self.local, self._local_keys = other.local, other._local_keys

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of an optimizer makes a state of its own when it needs one."""


class Distributed:
    """What is put in front of an optimizer's class; the attributes are those others rely on."""

    _HAS_AGGREGATE_GRAD = True
    _horovod_settings: ClassVar[Settings]

    @property
    def _horovod(self) -> State:
        state = vars(self).get(_STATE)
        if state is None or state.owner != id(self):  # this one was made of a config, or is a copy
            # By `vars`, since Keras tracks what is assigned.
            state = vars(self)[_STATE] = State(self, self._horovod_settings)
        return state

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce."""
        return self._horovod_settings.process_set

    @property
    def scale_local_gradients(self) -> bool:
        """Whether gradients of local variables are divided by the number of ranks."""
        return self._horovod_settings.scale_local_gradients

    @property
    def _allreduce_grads(self) -> Callable[..., list[Gradient]]:
        reduce: Callable[..., list[Gradient]] = self._horovod.reduce
        return reduce

    @property
    def _agg_helper(self) -> Any:
        return self._horovod.window

    @property
    def _local_vars(self) -> list[Any]:
        return self._horovod.local

    def register_local_var(self, var: Any) -> None:
        """Says that only this rank has a variable: its gradient is never reduced."""
        self._horovod.add_local(var)

    def _allreduce(self, grads: Sequence[Gradient], vars: Sequence[Any]) -> list[Gradient]:
        """Reduces gradients; may be replaced on an object."""
        return self._allreduce_grads(grads, vars)

    @property
    def variables(self) -> CallableList:
        """The optimizer's variables, for ``optimizer.variables`` and ``optimizer.variables()``."""
        own: Any = super().variables  # type: ignore[misc]
        return CallableList(own if isinstance(own, list) else own())

    def get_weights(self) -> list[Any]:
        """The values of the optimizer's variables, as numpy arrays."""
        return [variable.numpy() for variable in self.variables]

    def _done(self, grads: Sequence[Gradient]) -> list[bool]:
        """Which gradients have been reduced, by a tape; asked before a branch renames them."""
        is_reduced = self._horovod.backend.is_reduced
        return [grad is not None and is_reduced(grad) for grad in grads]

    def _reduced(
        self, grads: Sequence[Gradient], variables: Sequence[Any], done: Sequence[bool]
    ) -> list[Gradient]:
        """The gradients a step is taken with: reduced, unless done or of a local variable."""
        state = self._horovod
        result, shared = list(grads), []
        for place, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if done[place]:
                continue
            if state.is_local(variable):
                if self.scale_local_gradients:
                    result[place] = state.backend.local_gradient(grad, self.process_set)
            elif grad is not None and getattr(variable, "overwrite_with_gradient", False):
                # No gradient but the variable's next value, a range that all ranks must share.
                result[place] = state.backend.largest(grad, self.process_set)
            else:
                shared.append(place)
        if any(grads[place] is not None for place in shared):
            reduced = self._allreduce(
                [grads[place] for place in shared], [variables[place] for place in shared]
            )
            for place, grad in zip(shared, reduced, strict=True):
                result[place] = grad
        return result

    def _hand_out(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Reduces gradients for somebody who will give them to a step, marked as reduced."""
        state = self._horovod
        reduced = self._reduced(grads, variables, self._done(grads))
        state.backend.mark_reduced(reduced)
        state.handed_out = True
        return reduced

    def _step(
        self,
        grads: Sequence[Gradient],
        variables: Sequence[Any],
        apply: Callable[[list[Gradient], list[Any]], Any],
    ) -> Any:
        """Takes a step with gradients of all ranks, or adds them to the window under way.

        Args:
            grads: of this rank's pass.
            variables: those they belong to.
            apply: what the class of the optimizer does.

        Returns:
            What `apply` returns; None in a window.

        Raises:
            ValueError: ``compute_gradients`` has summed gradients, and these are others. With
                averages that is harmless: the mean of what is equal on all ranks is that again.
        """
        state = self._horovod
        state.backend.check_replicas()
        done = self._done(grads)
        handed_out, state.handed_out = state.handed_out, False
        changed = any(grad is not None and not it for grad, it in zip(grads, done, strict=True))
        if handed_out and changed and state.settings.op is ReduceOp.Sum:
            raise ValueError(
                "the gradients that compute_gradients() summed over the ranks were changed before "
                "apply_gradients(), which would sum them again. Use op=Average, or clip with "
                "the optimizer's own clipnorm, global_clipnorm or clipvalue"
            )
        if state.window is None:
            return _outermost(apply, self._reduced(grads, variables, done), list(variables))

        # The window may end with variables that only earlier passes had gradients of.
        are_done = dict(zip(map(id, variables), done, strict=True))

        def close(totals: list[Gradient], these: list[Any]) -> None:
            flags = [are_done.get(id(variable), False) for variable in these]
            _outermost(apply, self._reduced(totals, these, flags), these)

        state.window.add(grads, variables, close)
        return None


def _outermost(apply: Callable[..., Any], grads: list[Gradient], variables: list[Any]) -> Any:
    with reduced_outside():
        return apply(grads, variables)


def steps_alone() -> bool:
    """Whether no optimizer around this one has reduced already."""
    return not _reduced_outside.get()


# ---------------------------------------------------------------------------------------------
# Putting in front


def take_over(optimizer: Any, mixin: Any, settings: Settings) -> Any:
    """Puts `mixin` in front of the optimizer's class, in place.

    Raises:
        ValueError: the optimizer is distributed already.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError(
            "the optimizer is a DistributedOptimizer already, maybe by another name: what "
            "DistributedOptimizer returns is the object that it was given"
        )
    kind: Any = type(optimizer)
    try:
        derived = _derived(mixin, kind, settings)
    except TypeError:  # groups of variables can't be looked up: a class for this one alone
        derived = _derived.__wrapped__(mixin, kind, settings)
    object.__setattr__(optimizer, "__class__", derived)
    vars(optimizer)[_STATE] = State(optimizer, settings)
    return optimizer


@functools.cache
def _derived(mixin: Any, kind: Any, settings: Settings) -> Any:
    """One class for each kind and settings, so that ``from_config`` knows what it makes."""
    return mixin._derive(kind, {"_horovod_settings": settings, "__doc__": _doc(kind)})


class Shown(type):
    """The class of the classes: tools look for ``horovod._keras`` in how an optimizer prints."""

    def __repr__(cls) -> str:
        """What ``str(type(optimizer))`` gives."""
        return f"<class 'horovod._keras.{cls.__name__}'>"


def derive(mixin: Any, kind: Any, content: dict[str, Any]) -> Any:
    """A class of the mixin and a kind, with the name of that and a metaclass for its own."""
    meta = Shown if type(kind) is type else type("Shown", (Shown, type(kind)), {})
    return meta(kind.__name__, (mixin, kind), {"__qualname__": kind.__qualname__, **content})


def _doc(kind: Any) -> str:
    return f"A `{kind.__module__}.{kind.__qualname__}` that works over ranks."


def distribute_around(kind: Any, wrap: Callable[[Any, Settings], Any]) -> None:
    """Makes instances of a class distributed if the optimizer inside of them is.

    A LossScaleOptimizer looks for infinities before it calls the optimizer inside of it, which then
    is too late to reduce: ranks would skip different steps. Keras itself puts one around the
    optimizer of a float16 model in ``compile``, so it is the class that has to know. One that is
    older than the distribution of the optimizer inside finds out when it is used.

    Args:
        kind: a class whose first argument is another optimizer, later its ``inner_optimizer``.
        wrap: distributes an instance with the settings of the optimizer inside.
    """
    if hasattr(kind.__init__, "_horovod_around"):
        return

    def follow(self: Any) -> bool:
        inner = self.inner_optimizer
        if isinstance(self, Distributed) or not isinstance(inner, Distributed):
            return False
        wrap(self, inner._horovod_settings)._horovod.share_local(inner._horovod)
        return True

    plain = kind.__init__

    @functools.wraps(plain)
    def init(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, inner_optimizer, *args, **kwargs)
        follow(self)

    def following(name: str) -> Callable[..., Any]:
        method = vars(kind)[name]

        @functools.wraps(method)
        def use(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (getattr(self, name) if follow(self) else method.__get__(self))(*args, **kwargs)

        return use

    for name in _USES & vars(kind).keys():
        setattr(kind, name, following(name))
    init._horovod_around = True  # type: ignore[attr-defined]
    kind.__init__ = init


# By which an optimizer gets gradients or makes them.
_USES = {
    "apply",
    "apply_gradients",
    "compute_gradients",
    "_compute_gradients",
    "get_gradients",
    "stateless_apply",
}
