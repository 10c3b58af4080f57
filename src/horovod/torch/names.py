"""Names an optimizer's parameters, alike on all ranks; must not know what is sent under them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from horovod.common import ops
from horovod.common.process_sets import ProcessSet

Groups = list[dict[str, Any]]


def parameters_of(groups: Groups) -> Iterator[torch.Tensor]:
    """Every parameter of an optimizer's groups, in order."""
    return itertools.chain.from_iterable(group["params"] for group in groups)


def names_of(
    groups: Groups, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """The name of each parameter, in order; made from its place where none was given.

    Raises:
        ValueError: `named_parameters` holds something else, a name twice, or not every parameter.
    """
    if named_parameters is None:
        names: dict[torch.Tensor, str] = {}
        for index in range(len(groups)):
            names.update(names_of_group(groups, index))
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
    missing = sum(parameter not in names for parameter in parameters_of(groups))
    if missing:
        raise ValueError(f"named_parameters lacks {missing} of the optimizer's parameters")
    return {parameter: names[parameter] for parameter in parameters_of(groups)}


def names_of_group(groups: Groups, index: int) -> dict[torch.Tensor, str]:
    """Names made from the places of one group's parameters."""
    return {p: f"allreduce.noname.{index}.{i}" for i, p in enumerate(groups[index]["params"])}


class _Uses:
    """How often each name of a process set was used by an optimizer since the engine started."""

    def __init__(self) -> None:
        self._run = -1
        self._count: Counter[tuple[int | None, str]] = Counter()

    def next(self, names: list[str], process_set: ProcessSet, run: int) -> int:
        if run != self._run:
            self._run, self._count = run, Counter()
        keys = [(process_set.uid, name) for name in names]
        number = max((self._count[key] for key in keys), default=0)
        for key in keys:
            self._count[key] = number + 1
        return number


_uses = _Uses()


class Prefix:
    """Keeps apart the names of several optimizers with equal names of parameters among theirs.

    Counts per name, so that an optimizer that only one rank has, say of a model for evaluation,
    doesn't shift those of other names. Members of a process set make, or first use, the others in
    the same order. A copy counts once it is used, and with a new engine everything counts anew.
    """

    def __init__(self, names: Iterable[str], process_set: ProcessSet) -> None:
        self._names = list(names)
        self._process_set = process_set
        self._run = -1
        self._text = ""

    def claim(self) -> None:
        """Counts from now on, if it doesn't yet."""
        run = ops.enter()
        if run != self._run:
            self._run = run
            number = _uses.next(self._names, self._process_set, run)
            self._text = f"optimizer{number}." if number else ""

    def __str__(self) -> str:
        """What comes before each name."""
        self.claim()
        return self._text
