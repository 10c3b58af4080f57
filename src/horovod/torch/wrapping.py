"""Puts behaviour in front of an optimizer object's class; must not know which behaviour."""

from __future__ import annotations

import functools
from typing import Any

import torch

from horovod.torch.names import Prefix, names_of_group, parameters_of


class Wrapped(torch.optim.Optimizer):
    """The base of what is put in front: knows parameters by name, and can be copied and pickled."""

    def _distribute(self, names: dict[torch.Tensor, str], options: Any) -> None:
        """Stands in for ``__init__``; the wrapped optimizer's attributes are there already."""
        self._parameter_names = names
        self._prefix = Prefix(names.values(), options.process_set)
        self._options = options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as for the wrapped optimizer; they are reduced too."""
        super().add_param_group(param_group)
        # The first name tells optimizers apart that have added groups at equal places.
        first = next(iter(self._parameter_names.values()), "")
        names = names_of_group(self.param_groups, len(self.param_groups) - 1)
        self._parameter_names.update((p, f"{name}.{first}") for p, name in names.items())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of the wrapped optimizer."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        # A scheduler that was made before wrapping goes on writing into the same list.
        groups[:] = self.param_groups
        self.param_groups = groups

    def __reduce__(self) -> Any:
        """Copies and pickles what the wrapped class does, and how it is reduced."""
        names = [self._parameter_names[p] for p in parameters_of(self.param_groups)]
        mixin, kind = type(self).__bases__
        return _revive, (mixin, kind, names, self._options), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, over its own parameters; loading a state comes here too."""
        super().__setstate__(state)
        revived = vars(self).pop("_revived", None)
        if revived is not None:
            names, options = revived
            named = dict(zip(parameters_of(self.param_groups), names, strict=True))
            self._distribute(named, options)


def _revive(mixin: Any, kind: Any, names: list[str], options: Any) -> Wrapped:
    wrapper = _derived(mixin, kind)
    optimizer: Wrapped = wrapper.__new__(wrapper)
    vars(optimizer)["_revived"] = (names, options)
    return optimizer


@functools.cache
def _derived(mixin: Any, kind: Any) -> Any:
    doc = f"A `{kind.__module__}.{kind.__qualname__}` that works over ranks."
    return type(kind.__name__, (mixin, kind), {"__module__": mixin.__module__, "__doc__": doc})


def take_over(
    optimizer: torch.optim.Optimizer, mixin: Any, names: dict[torch.Tensor, str], options: Any
) -> Any:
    """An object of a class derived from `mixin` and the optimizer's own, with all that it has.

    Groups, state, hooks and options are the optimizer's, by reference.

    Raises:
        ValueError: the optimizer has an attribute of a name that `mixin` uses.
    """
    kind: Any = type(optimizer)
    of_torch = {*dir(torch.optim.Optimizer), "param_groups", "_step_supports_amp_scaling"}
    hidden = sorted({*dir(optimizer)} & {*dir(mixin)} - of_torch)
    if hidden:
        raise ValueError(
            f"{kind.__name__} has attributes that a DistributedOptimizer has too, for another "
            f"purpose: {', '.join(hidden)}. Rename them"
        )
    wrapper = _derived(mixin, kind)
    wrapped = wrapper.__new__(wrapper)
    for key, value in vars(optimizer).items():
        # An attribute that stands for a method, such as the step that a scheduler replaced, is
        # the given object's own.
        if not callable(getattr(mixin, key, None)):
            vars(wrapped)[key] = value
    if "step" in vars(optimizer):
        # A scheduler that watches the given object must not miss the steps taken here.
        vars(optimizer)["_opt_called"] = True
    wrapped._distribute(names, options)
    wrapped._prefix.claim()
    return wrapped
