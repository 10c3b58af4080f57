"""The table of operations; submit, poll, synchronize; must not know any framework.

A front end enters a `Call`, turns its tensors into views (pointers, data type, shape) and submits
them. What goes wrong before that, inside the `with`, is announced to the other ranks, so that none
of them waits for a call that never comes.
"""

from __future__ import annotations

import itertools
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, TypeAlias

from horovod.common import basics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.common.sites import Sites


class ReduceOp(IntEnum):
    """How the terms of the ranks become one; the members are also names of the front ends."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class DType(IntEnum):
    """The data types of the engine; each front end maps its own onto these by name."""

    uint8 = 0
    int8 = 1
    uint16 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float16 = 6
    float32 = 7
    float64 = 8
    bool = 9
    bfloat16 = 10
    complex64 = 11
    complex128 = 12


@dataclass(frozen=True)
class Op:
    """One row of the table of operations; the engine's own table says what each may be given."""

    kind: int
    name: str
    reductions: frozenset[ReduceOp] | None = None
    """What it can reduce with, if that is less than the engine could."""


ALLREDUCE = Op(0, "allreduce")
ALLGATHER = Op(1, "allgather")
BROADCAST = Op(2, "broadcast")
ALLTOALL = Op(3, "alltoall")
REDUCESCATTER = Op(4, "reducescatter", frozenset({ReduceOp.Average, ReduceOp.Sum}))
BARRIER = Op(5, "barrier")
JOIN = Op(6, "join")


_FIRST_ROOT, _LAST_ROOT = -(1 << 31), (1 << 31) - 1  # what the engine can read


View: TypeAlias = basics.View
"""A row-major tensor as the engine sees it; ``output`` 0: the engine allocates it."""


def reduce_op(op: int | None, average: bool | None) -> ReduceOp:
    """What ``op=`` and the older ``average=`` mean together; neither means Average.

    Raises:
        ValueError: both are given, or ``op`` is none of the constants.
        TypeError: ``average`` is a string: a name at the place of ``average``.
    """
    if average is None and isinstance(op, ReduceOp):
        return op
    if isinstance(average, str):
        raise TypeError(
            f"average must be True or False, not {average!r}: pass name=, it comes third"
        )
    if average is not None:
        if op is not None:
            raise ValueError(
                "give op or average, not both: average=True is op=Average, False is op=Sum"
            )
        warnings.warn(
            "average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4
        )
        return ReduceOp.Average if average else ReduceOp.Sum
    try:
        return ReduceOp.Average if op is None else ReduceOp(op)
    except ValueError:
        raise ValueError(f"op {op!r} is none of {', '.join(ReduceOp.__members__)}") from None


def root_number(root: object) -> int:
    """The root rank as the engine can read it, which judges it.

    Raises:
        ValueError: no rank could have this number.
        TypeError: it is no integer.
    """
    number = operator.index(root)  # type: ignore[arg-type]
    if not _FIRST_ROOT <= number <= _LAST_ROOT:
        raise ValueError(f"there is no rank {number} that could be the root")
    return number


def reject(op: Op, name: str, process_set: int, error: BaseException) -> None:
    """Makes the matching calls of the other ranks fail: this rank's can't be made.

    Args:
        op: the row of the table.
        name: the call's full name.
        process_set: the engine's own number of the set.
        error: why.
    """
    if basics.is_initialized():
        basics.engine().reject(op.kind, name, process_set, basics.reason(error))


class _Calls:
    """Handles and call numbers of one run of the engine; both start again with the next run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Any = None
        self.runs = 0
        self.pending: dict[int, Call] = {}
        self.restart(None)

    def restart(self, engine: Any) -> None:
        self.engine = engine
        self.runs += 1
        self.handles = itertools.count(1)
        self.pending.clear()
        self.unnamed: dict[tuple[int, str], itertools.count[int]] = {}
        self.sites = Sites(engine.add_site if engine is not None else lambda text: 0)

    def enter(self, engine: Any) -> None:
        if self.engine is not engine:
            with self.lock:
                if self.engine is not engine:
                    self.restart(engine)

    def number(self, process_set: int, prefix: str) -> int:
        with self.lock:
            return next(self.unnamed.setdefault((process_set, prefix), itertools.count(1)))

    def renumber(self) -> None:
        with self.lock:
            self.unnamed.clear()

    def add(self, call: Call) -> int:
        with self.lock:
            handle = next(self.handles)
            self.pending[handle] = call
            return handle

    def drop(self, handle: int, call: Call) -> None:
        """Frees the handle, unless another engine runs by now whose call has the same one."""
        with self.lock:
            if self.pending.get(handle) is call:
                del self.pending[handle]


_calls = _Calls()
pending_calls = _calls.pending
"""What is in flight, by handle; for looking at."""


class Call:
    """One call of an operation on this rank, from when its name is known until it is finished.

    A context manager: an exception inside it, before `submit` hands over to the engine, makes the
    matching calls of the other ranks fail too.

    Args:
        op: the row of the table.
        name: the user's name, None for the next number of the (process set, operation).
        process_set: who takes part; this rank must.
        grouped: several tensors go under the one name.

    Raises:
        ValueError: the process set is unknown or this rank isn't in it.
        HorovodInternalError: the engine isn't running.
    """

    __slots__ = (
        "_handed_over",
        "_set",
        "engine",
        "finish",
        "grouped",
        "name",
        "op",
        "process_set",
        "ticket",
        "unnamed",
    )

    finish: Callable[[Any], Any]
    """Makes the user's result from the engine's."""
    ticket: int
    """The engine's own handle."""

    def __init__(
        self, op: Op, name: str | None, process_set: ProcessSet, *, grouped: bool = False
    ) -> None:
        """Gives the call its name and, if it has none, its number."""
        self.op = op
        self.process_set = process_set
        self.grouped = grouped
        self.engine = basics.engine()
        if _calls.engine is not self.engine:
            _calls.enter(self.engine)
        self._set = _set_id(process_set, op.name, name)
        self._handed_over = False
        self.unnamed = name is None
        prefix = f"grouped_{op.name}" if grouped else op.name
        if name is not None and not _is_text(name):  # nor can another rank have called it so
            raise ValueError(f"{basics.label()} {op.name}: the name {name!r} is no valid text")
        if name is None:
            number = _calls.number(self._set, prefix) if op.kind < BARRIER.kind else None
            name = "noname" if number is None else f"noname.{number}"
        self.name = f"{prefix}.{name}"

    def __enter__(self) -> Call:
        """Starts the part whose failure the other ranks are told."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tells the other ranks if the call failed here, and the caller which call it was."""
        if error is None or self._handed_over:
            return
        self.engine.reject(self.op.kind, self.name, self._set, basics.reason(error))
        if kind is ValueError or kind is TypeError:
            label = self.name.removeprefix(f"{self.op.name}.")  # as the engine's own errors say it
            raise kind(f'{basics.label()} {self.op.name} "{label}": {error}') from error

    def submit(
        self,
        views: Sequence[View],
        finish: Callable[[Any], Any],
        *,
        keep: object = None,
        reduce_op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = -1,
        splits: Sequence[int] | None = None,
    ) -> int:
        """Hands the call to the engine; does not wait.

        Args:
            views: the tensors, one unless the call is grouped.
            finish: makes the user's result from the engine's, on the thread that synchronizes.
            keep: what owns the views' memory; referenced until the call is done.
            reduce_op: for operations that reduce.
            prescale: factor on each rank's term.
            postscale: factor on the result.
            root: global rank, for operations that have a root.
            splits: rows for each member, alltoall only; None for equal parts.

        Returns:
            The handle for `poll` and `synchronize`.

        Raises:
            ValueError: an argument is wrong, or the name is in flight already.
            HorovodInternalError: the engine is not running, or the operation can't reduce so.
        """
        allowed = self.op.reductions
        if allowed is not None and reduce_op not in allowed:
            names = " or ".join(sorted(op.name for op in allowed))
            raise HorovodInternalError(
                f"{self.name}: op must be {names}, not {reduce_op.name}", op=self.name
            )
        root, prescale, postscale = root_number(root), float(prescale), float(postscale)
        try:
            self.ticket = self.engine.submit(
                self.op.kind,
                self.name,
                self._set,
                views,
                int(reduce_op),
                prescale,
                postscale,
                root,
                splits,
                self.unnamed,
                keep,
                _calls.sites.here(),
            )
        except basics.Failure as failure:
            self._handed_over = True  # nobody waits for a call that the engine's own end ended
            raise basics.translated(failure, self.name) from None
        except ValueError:
            # The engine's judgement: it told the others, unless this is about a name in flight
            # here, whose first call goes on. What it could not even read is another exception.
            self._handed_over = True
            raise
        self._handed_over = True
        self.finish = finish
        return _calls.add(self)


def _is_text(name: object) -> bool:
    try:
        str(name).encode()
    except UnicodeEncodeError:  # a lone surrogate, as undecodable file names have
        return False
    return True


def _set_id(process_set: ProcessSet, *names: str | None) -> int:
    """The engine's number of a set that this rank is in; messages have the call's `names`."""
    if isinstance(process_set, ProcessSet) and process_set.uid == 0:
        return 0
    what = ".".join(str(name) for name in names if name is not None)
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{what}: process_set must be a ProcessSet, not {process_set!r}")
    number = process_set.uid
    if number is None or process_set.ranks is None:
        raise ValueError(
            f"{what}: {process_set} is not registered: see init() and add_process_set()"
        )
    if basics.rank() not in process_set.ranks:
        raise ValueError(f"{what}: rank {basics.rank()} is not in {process_set}")
    return number


def next_name(process_set: ProcessSet, prefix: str) -> str:
    """The next name of a sequence of its own, for what is made of several calls."""
    _calls.enter(basics.engine())
    return f"{prefix}.noname.{_calls.number(_set_id(process_set, prefix), prefix)}"


def ranks(process_set: ProcessSet) -> list[int]:
    """The global ranks of a registered process set, ascending."""
    return process_set.ranks or []


def members(process_set: ProcessSet) -> int:
    """How many ranks are in a registered process set."""
    return len(ranks(process_set))


def index(process_set: ProcessSet) -> int:
    """This rank's place among the members of a registered process set."""
    return ranks(process_set).index(basics.rank())


def poll(handle: int) -> bool:
    """Whether the operation is done, so that `synchronize` would not wait.

    Does not block. Any thread may call it.

    Args:
        handle: from an asynchronous operation.

    Raises:
        ValueError: the handle is unknown or was synchronized already.
        HorovodInternalError: this is a forked child.
    """
    call = _calls.pending.get(handle)
    if call is None:
        raise ValueError(f"handle {handle!r} is unknown or was synchronized already")
    try:
        return bool(call.engine.poll(call.ticket))
    except basics.Failure as failure:
        raise basics.translated(failure, call.name) from None


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and gives its result, once; the handle is then free.

    Blocks with the GIL released until every member has submitted its call and the data has moved,
    or an error ends it.

    Args:
        handle: from an asynchronous operation.

    Returns:
        The output tensor; for grouped operations a tuple of them; for alltoall ``(output,
        received_splits)``; for barrier None; None for a handle that is unknown or was synchronized
        already.

    Raises:
        HorovodInternalError: ranks disagree (`MismatchError`), a peer is lost (`PeerLostError`),
            or the engine stopped.
    """
    call = _calls.pending.get(handle)
    if call is None:
        return None
    if _debts.owed and not _debts.paying:
        with paying():
            for finish in list(_debts.owed.values()):
                finish()
    result = basics.take(call.engine, call.ticket, call.name)
    _calls.drop(handle, call)
    if result is None:  # another thread has taken it
        return None
    if result.kind:
        raise basics.exception(result.kind, result.text, result.rank, call.name)
    return call.finish(result)


class _Debts(threading.local):
    """What this thread has begun that other ranks may be waiting for, and how to finish it."""

    def __init__(self) -> None:
        self.owed: dict[int, Callable[[], None]] = {}
        self.paying = False


_debts = _Debts()


def owe(who: int, finish: Callable[[], None]) -> None:
    """Has `finish` called before this thread next waits for other ranks in `synchronize`.

    For calls that this rank has put off: another may already wait for them, and can't come to
    whatever this rank would wait for.
    """
    _debts.owed[who] = finish


def owe_nothing(who: int) -> None:
    """Takes back what `owe` said."""
    _debts.owed.pop(who, None)


@contextmanager
def paying() -> Iterator[None]:
    """Inside it nothing owed is finished: this is the finishing."""
    before, _debts.paying = _debts.paying, True
    try:
        yield
    finally:
        _debts.paying = before


def run() -> int:
    """A number that changes when handles lose their meaning, that is with a new engine."""
    return _calls.runs


def enter() -> int:
    """The `run` of the engine that runs now, which need not have had a call yet."""
    _calls.enter(basics.engine())
    return _calls.runs


def synchronize_all(handles: Iterable[int]) -> list[Any]:
    """Synchronizes each handle, also after one has failed, then raises the first error."""
    results: list[Any] = []
    first: Exception | None = None
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except (HorovodInternalError, ValueError) as error:
            first = first or error
    if first is not None:
        raise first
    return results


def renumber() -> None:
    """Starts the numbers of unnamed calls again, once every rank has come to the same point."""
    _calls.renumber()


def barrier(process_set: ProcessSet) -> None:
    """Waits until every member of the set has called it.

    Earlier asynchronous operations may still be in flight afterwards.

    Args:
        process_set: who waits for whom.

    Raises:
        HorovodInternalError: a peer is lost or the engine stopped.
    """
    with Call(BARRIER, None, process_set) as call:
        handle = call.submit((), lambda result: None)
    synchronize(handle)


def join(process_set: ProcessSet) -> int:
    """Says that this rank is out of data, and waits until every rank has said so.

    Meanwhile the others' allreduces go on without this rank's terms; Average still divides by the
    size of the set.

    Args:
        process_set: the global one.

    Returns:
        The rank that joined last, the same on every rank.

    Raises:
        HorovodInternalError: a peer is lost or the engine stopped.
    """
    with Call(JOIN, None, process_set) as call:
        handle = call.submit((), lambda result: int(result.value))
    last = int(synchronize(handle))
    # Nothing is in flight now, and ranks may have made different numbers of calls, also in smaller
    # sets: match anew.
    renumber()
    return last
