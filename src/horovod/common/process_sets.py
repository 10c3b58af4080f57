"""Groups of ranks that run collectives among themselves; knows no operation and no framework."""

from __future__ import annotations

import operator
import threading
from collections import deque
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
    uid: int | None = None
    """The engine's own number, which no other set of its ever gets."""

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
        self.process_set_id = self.uid = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        """A set is one of the job's, whoever refers to it."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A registered set is, where it is read, the one that is registered for its ranks there."""
        return (ProcessSet if self.uid is None else _same), (self.ranks,)

    def __str__(self) -> str:
        """The form that users and their tests know."""
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks. Its id is always 0; its ranks are known once ``init()`` has run."""

    process_set_id = uid = 0

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
        ValueError: a set of these ranks is registered, a rank is given twice or does not exist; the
            other ranks' calls then raise it too. Or the ranks of the job gave different ones.
        HorovodInternalError: the engine is not running, or a peer was lost.
    """
    engine = basics.engine()
    try:
        added = _addable(engine, process_set)
    except BaseException as error:
        # It counts as this rank's call, or the others' would wait for its next one and match that.
        engine.reject_process_set(basics.reason(error))
        raise
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
    what = f"removal of process set {number}"
    _complete(engine, engine.remove_process_set, process_set.uid, what)
    process_set._invalidate()  # not before all agreed: after a mismatch the set is still there
    _registrar.forget(process_set)
    return True


def registered(number: int) -> ProcessSet:
    """The process's object of a registered set, for code that can only carry its `uid`.

    Raises:
        ValueError: it was removed, or other code registered it.
    """
    return _registrar.find(number)


def uid_of(process_set_id: int) -> int:
    """The engine's own number of the set that has this id now; 0, the global set, always exists.

    Raises:
        ValueError: no set has it.
    """
    if process_set_id == 0:
        return 0
    for uid, label in _labels.read(basics.engine()).items() if basics.is_initialized() else ():
        if label == process_set_id:
            return uid
    raise ValueError(f"there is no process set {process_set_id}")


def _same(ranks: list[int]) -> ProcessSet:
    """What a pickled set becomes: the registered set of these ranks, else a new one."""
    return _registrar.of(ranks) or ProcessSet(ranks)


def ids_and_ranks() -> dict[int, list[int]]:
    """Every registered set, also those that other code registered: ids and their ranks."""
    engine = basics.engine()
    ranks = engine.process_sets()
    return dict(sorted((label, list(ranks[uid])) for uid, label in _labels.read(engine).items()))


def _addable(engine: Any, process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check(added, basics.size())
    known = _find(engine, added)
    if known is not None:
        known = _labels.read(engine)[known]
        raise ValueError(f"the ranks {added.ranks} are process set {known} already")
    return added


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
        uid = _complete(engine, engine.add_process_set, process_set.ranks, what)
    except MismatchError as error:
        raise ValueError(str(error)) from error
    _registrar.remember(process_set, uid, _labels.read(engine)[uid])


def _complete(engine: Any, call: Callable[[Any, int], int], argument: Any, what: str) -> int:
    """Makes one of the engine's calls and waits for its result.

    One at a time: labels are given in the order of the calls, which is the same on every rank.
    """
    with _changing:
        _labels.read(engine)  # also what a wait that was interrupted has changed
        try:
            handle = call(argument, Sites(engine.add_site).here())
        except basics.Failure as failure:
            raise basics.translated(failure, what) from None
        result = basics.finish(engine, handle, what)
        _labels.read(engine)
    return int(result.value)


_changing = threading.Lock()


class _Labels:
    """The ids that users see: small numbers, those of removed sets again, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Any = None

    def forget(self) -> None:
        """The engine has ended."""
        with self._lock:
            self._engine = None

    def read(self, engine: Any) -> dict[int, int]:
        """By the engine's numbers. The same on every rank, if it is read after each change."""
        with self._lock:
            if self._engine is not engine:
                self._engine = engine
                self._labels: dict[int, int] = {}
                self._free: deque[int] = deque()
            known = engine.process_sets()
            for uid in [uid for uid in self._labels if uid not in known]:
                self._free.append(self._labels.pop(uid))
            for uid in sorted(known):
                if uid not in self._labels:
                    fresh = not self._free
                    self._labels[uid] = len(self._labels) if fresh else self._free.popleft()
            return dict(self._labels)


_labels = _Labels()


class _Registrar:
    """Keeps the ids of the process's ``ProcessSet`` objects true to the world that is running."""

    def __init__(self) -> None:
        self._bound: list[ProcessSet] = []

    def remember(self, process_set: ProcessSet, uid: int, label: int) -> None:
        process_set.uid, process_set.process_set_id = uid, label
        if all(known is not process_set for known in self._bound):
            self._bound.append(process_set)

    def forget(self, process_set: ProcessSet) -> None:
        self._bound = [known for known in self._bound if known is not process_set]

    def find(self, number: int) -> ProcessSet:
        for process_set in (global_process_set, *self._bound):
            if process_set.uid == number:
                return process_set
        raise ValueError(
            "the process set is not registered, or not any more: see init() and add_process_set()"
        )

    def of(self, ranks: list[int]) -> ProcessSet | None:
        running = [global_process_set] if basics.is_initialized() else []
        return next((known for known in (*running, *self._bound) if known.ranks == ranks), None)

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
            uid = _find(engine, process_set)
            if uid in taken:
                process_set._invalidate()
                flaws.append(
                    f"process_sets[{index}] has the ranks {process_set.ranks}, as process set "
                    f"{_labels.read(engine)[uid]} has"
                )
            elif uid is not None:
                self.remember(process_set, uid, _labels.read(engine)[uid])
            elif fresh:
                _add(engine, process_set)
            else:
                flaws.append(
                    f"process_sets[{index}], {process_set.ranks}, was not registered by the first "
                    f"init(); use add_process_set()"
                )
            if process_set.uid is not None:
                taken.add(process_set.uid)
        if flaws:
            raise ValueError("; ".join(flaws))

    def stopped(self) -> None:
        for process_set in self._bound:
            process_set._invalidate()
        self._bound = []
        _labels.forget()


_registrar = _Registrar()
basics.set_registrar(_registrar)
