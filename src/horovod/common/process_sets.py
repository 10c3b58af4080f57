"""Groups of ranks that run collectives among themselves; knows no operation and no framework."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horovod.common import basics
from horovod.common.exceptions import MismatchError
from horovod.common.sites import Sites


class ProcessSet:
    """A group of ranks. It can be used once ``init()`` or ``add_process_set()`` registered it.

    Two objects are never equal, even if they hold the same ranks.

    Args:
        ranks_or_comm: the global ranks of the members, in any order. (MPI communicators are not
            supported.)

    Raises:
        ValueError: something else than integers was given.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"a process set is made of ranks, not of a {type(ranks_or_comm).__name__}; MPI "
                f"communicators are not supported"
            )
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError as error:
            raise ValueError(f"a process set is made of integers: {error}") from error

    def size(self) -> int | None:
        """How many ranks it has, None if it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's number in the set, None if the set is not registered.

        Raises:
            ValueError: this process is not a member, or horovod is not initialized.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        own = basics.rank()
        if own not in self.ranks:
            raise ValueError(f"rank {own} is not a member of {self}")
        return self.ranks.index(own)

    def included(self) -> bool | None:
        """Whether this process is a member, None if the ranks are not known yet.

        Raises:
            ValueError: horovod is not initialized.
        """
        own = basics.rank()
        return None if self.ranks is None else own in self.ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        """A set is one of the job's, whoever refers to it."""
        return self

    def __str__(self) -> str:
        """The form that users and their tests know."""
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks. Its id is always 0; its ranks are known once ``init()`` has run."""

    process_set_id = 0

    def __init__(self) -> None:
        super().__init__(())
        self.ranks = None

    def _invalidate(self) -> None:
        """It is registered for ever."""

    def __reduce__(self) -> str:
        """It is one object in every process."""
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()
"""The one set of all ranks, shared by all front ends."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a set. Every rank of the job must call it, members or not, with the same ranks.

    Blocks until all have called it. Calls match by their order.

    Args:
        process_set: the set, which may have been removed before, or its ranks.

    Returns:
        The registered set.

    Raises:
        ValueError: a set of these ranks is registered, a rank is given twice or does not exist, or
            the ranks of the job gave different ones.
        HorovodInternalError: the engine is not running, or a peer was lost.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    engine = basics.engine()
    _check(added, basics.size())
    known = _find(engine, added)
    if known is not None:
        raise ValueError(f"the ranks {added.ranks} are process set {known} already")
    _add(engine, added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a set out of use. Every rank of the job must call it, members or not.

    Blocks until all have called it. Operations of the set that are in flight raise
    HorovodInternalError.

    Args:
        process_set: the set; its object may be added again later.

    Returns:
        False if there is nothing to remove: the set is not registered, or is the global one.

    Raises:
        HorovodInternalError: the engine is not running, or a peer was lost.
    """
    number = process_set.process_set_id
    if number is None or process_set is global_process_set:
        return False
    engine = basics.engine()
    _complete(engine, engine.remove_process_set, number, f"removal of process set {number}")
    process_set._invalidate()  # not before all agreed: after a mismatch the set is still there
    _registrar.forget(process_set)
    return True


def ids_and_ranks() -> dict[int, list[int]]:
    """Every registered set, also those that other code registered: ids and their ranks."""
    return {int(k): list(v) for k, v in basics.engine().process_sets().items()}


def _check(process_set: ProcessSet, size: int) -> None:
    ranks = process_set.ranks or []
    if not ranks:
        raise ValueError("a process set has at least one rank")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"the process set {ranks} names a rank twice")
    if ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"the process set {ranks} names ranks outside 0 to {size - 1}")


def _find(engine: Any, process_set: ProcessSet) -> int | None:
    for number, ranks in engine.process_sets().items():
        if list(ranks) == process_set.ranks:
            return int(number)
    return None


def _add(engine: Any, process_set: ProcessSet) -> None:
    what = f"process set {process_set.ranks}"
    try:
        number = _complete(engine, engine.add_process_set, process_set.ranks, what)
    except MismatchError as error:
        raise ValueError(str(error)) from error
    process_set.process_set_id = number
    _registrar.remember(process_set)


def _complete(engine: Any, call: Callable[[Any, int], int], argument: Any, what: str) -> int:
    """Makes one of the engine's calls and waits for its result."""
    try:
        ticket = call(argument, Sites(engine.add_site).here())
    except basics.Failure as failure:
        raise basics.translated(failure, what) from None
    result = basics.result_of(engine, ticket, what)
    assert result is not None  # no other thread knows the ticket
    return int(result.value)


class _Registrar:
    """Keeps the ids of the process's ``ProcessSet`` objects true to the world that is running."""

    def __init__(self) -> None:
        self._bound: list[ProcessSet] = []

    def remember(self, process_set: ProcessSet) -> None:
        if all(known is not process_set for known in self._bound):
            self._bound.append(process_set)

    def forget(self, process_set: ProcessSet) -> None:
        self._bound = [known for known in self._bound if known is not process_set]

    def check(self, sets: Sequence[Any], size: int) -> list[list[int]]:
        ranks = []
        for index, process_set in enumerate(sets):
            if not isinstance(process_set, ProcessSet):
                kind = type(process_set).__name__
                raise ValueError(f"process_sets[{index}] is a {kind} and not a ProcessSet")
            if process_set is not global_process_set:
                _check(process_set, size)
                ranks.append(list(process_set.ranks or ()))
            else:
                ranks.append(list(range(size)))  # it learns them when the world begins
        return ranks

    def started(self, size: int) -> None:
        global_process_set.ranks = list(range(size))

    def bind(self, sets: Sequence[Any], fresh: bool) -> None:
        self.check(sets, basics.size())
        engine = basics.engine()
        flaws = []
        taken = {0}
        for index, process_set in enumerate(sets):
            number = _find(engine, process_set)
            if number in taken:
                process_set._invalidate()
                flaws.append(
                    f"process_sets[{index}] has the ranks {process_set.ranks}, as process set "
                    f"{number} has"
                )
            elif number is not None:
                process_set.process_set_id = number
                self.remember(process_set)
            elif fresh:
                _add(engine, process_set)
            else:
                flaws.append(
                    f"process_sets[{index}], {process_set.ranks}, was not registered by the first "
                    f"init(); use add_process_set()"
                )
            if process_set.process_set_id is not None:
                taken.add(process_set.process_set_id)
        if flaws:
            raise ValueError("; ".join(flaws))

    def stopped(self) -> None:
        for process_set in self._bound:
            process_set._invalidate()
        self._bound = []


_registrar = _Registrar()
basics.set_registrar(_registrar)
