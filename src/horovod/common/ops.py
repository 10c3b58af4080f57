"""The table of operations; submit, poll, synchronize; must not know any framework.

A front end enters a `Call`, turns its tensors into views (pointers, data type, shape) and submits
them. What goes wrong before that, inside the `with`, is announced to the other ranks, so that none
of them waits for a call that never comes. Tensors that the engine can read by itself need no view:
`start` is one step, and leaves to a `Call` whatever is unusual.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
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

    def prefix(self, grouped: bool) -> str:
        """What the names of its calls begin with, before a dot."""
        return _GROUPED[self.name] if grouped else self.name


ALLREDUCE = Op(0, "allreduce")
ALLGATHER = Op(1, "allgather")
BROADCAST = Op(2, "broadcast")
ALLTOALL = Op(3, "alltoall")
REDUCESCATTER = Op(4, "reducescatter", frozenset({ReduceOp.Average, ReduceOp.Sum}))
BARRIER = Op(5, "barrier")
JOIN = Op(6, "join")


_GROUPED = {
    op.name: f"grouped_{op.name}"
    for op in (ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, JOIN)
}
_FIRST_ROOT, _LAST_ROOT = -(1 << 31), (1 << 31) - 1  # what the engine can read


View: TypeAlias = basics.View
"""A row-major tensor as the engine sees it; ``output`` 0: the engine allocates it."""
Form: TypeAlias = basics.Form
"""How the engine itself reads an adapter's tensors, and makes the result of a call on them."""


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
    """The engine that has the calls in flight: the running one, or the last until the next runs.

    Handles are the engine's own, and their numbers start again with the next one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Any = None
        self.runs = 0
        self.sites = Sites(lambda text: 0)

    def enter(self, engine: Any) -> None:
        with self.lock:
            if self.engine is not engine:
                self.sites = Sites(engine.add_site)
                self.engine = engine
                self.runs += 1


_calls = _Calls()


def _engine() -> Any:
    """The running engine, which has the calls in flight from now on."""
    engine = basics.engine()
    if _calls.engine is not engine:
        _calls.enter(engine)
    return engine


class _Pending(Mapping[int, str]):
    """The full names of the calls in flight, by handle; for looking at."""

    def __getitem__(self, handle: int) -> str:
        return self._names()[handle]

    def __iter__(self) -> Iterator[int]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> dict[int, str]:
        engine = _calls.engine
        return {} if engine is None else dict(engine.calls())


pending_calls = _Pending()


def start(
    form: Form,
    op: Op,
    tensors: Any,
    name: str | None,
    process_set: ProcessSet,
    grouped: bool,
    reduce_op: ReduceOp = ReduceOp.Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = -1,
) -> int | None:
    """Submits a call in one step of the engine, if nothing about it is unusual; does not wait.

    Args:
        form: how to read the tensors.
        op: the row of the table, of an operation that has no further arguments.
        tensors: one, or a list of them.
        name: the user's name, None for the next number of the (process set, operation).
        process_set: who takes part; this rank must.
        grouped: there is a list of tensors.
        reduce_op: for operations that reduce.
        prescale: factor on each rank's term.
        postscale: factor on the result.
        root: global rank, for operations that have a root.

    Returns:
        The handle. None if the engine can't read an argument: then nothing has happened, and a
        `Call` can be made, which says what is wrong if anything is.

    Raises:
        ValueError: an argument is wrong, or the name is in flight already.
        HorovodInternalError: the engine isn't running.
    """
    engine = _engine()
    if not isinstance(process_set, ProcessSet):
        return None
    number = _set_id(process_set, op.name, name)
    if op.reductions is not None and reduce_op not in op.reductions:
        return None
    prefix = op.prefix(grouped)
    site = _calls.sites.here()
    try:
        handle: int | None = engine.start(
            form,
            op.kind,
            prefix,
            name,
            False,
            number,
            grouped,
            tensors,
            reduce_op,
            prescale,
            postscale,
            root,
            site,
        )
    except basics.Failure as failure:
        label = "noname" if name is None else name
        raise basics.translated(failure, f"{prefix}.{label}") from None
    except (TypeError, RuntimeError, MemoryError):
        # Before the engine had it, as an argument of a wrong type: a Call tells the other ranks.
        return None
    return handle


class _At(Enum):
    """Who has a call."""

    ADAPTER = 0
    DOOR = 1  # the engine looks at it
    ENGINE = 2


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
        "_at",
        "_set",
        "_start",
        "engine",
        "grouped",
        "name",
        "op",
        "process_set",
        "unnamed",
    )

    def __init__(
        self, op: Op, name: str | None, process_set: ProcessSet, *, grouped: bool = False
    ) -> None:
        """Gives the call its name and, if it has none, its number."""
        self.op = op
        self.process_set = process_set
        self.grouped = grouped
        self.engine = _engine()
        known = isinstance(process_set, ProcessSet)
        # Who gives no set at all makes this call of the global one, most likely, for the others.
        self._set = _set_id(process_set, op.name, name) if known else 0
        self._at = _At.ADAPTER
        # Bound here: in a frame that torch.compile traces, the method would lose its engine.
        self._start = self.engine.start
        self.unnamed = name is None
        prefix = op.prefix(grouped)
        if name is not None and not _is_text(name):  # nor can another rank have called it so
            raise ValueError(f"{basics.label()} {op.name}: the name {name!r} is no valid text")
        if isinstance(name, str):
            name = str.__str__(name)  # what it holds, also if its type is derived
        elif name is None:
            name = "noname"
            if op.kind < BARRIER.kind:
                name += f".{self.engine.next_number(self._set, prefix)}"
        self.name = f"{prefix}.{name}"
        if not known:
            with self:
                raise TypeError(f"process_set must be a ProcessSet, not {process_set!r}")

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
        if error is None or self._at is _At.ENGINE:
            return
        if self._at is _At.DOOR and isinstance(error, basics.Failure):
            # Nobody waits for a call that the engine's own end ended.
            raise basics.translated(error, self.name) from None
        if self._at is _At.DOOR and kind is ValueError:
            # The engine's judgement: it told the others, unless this is about a name in flight
            # here, whose first call goes on. What it could not even read is another exception.
            return
        self.engine.reject(self.op.kind, self.name, self._set, basics.reason(error))
        if kind is ValueError or kind is TypeError:
            label = self.name.removeprefix(f"{self.op.name}.")  # as the engine's own errors say it
            raise kind(f'{basics.label()} {self.op.name} "{label}": {error}') from error

    def start(
        self,
        form: Form,
        tensors: Any,
        *,
        reduce_op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = -1,
        splits: Sequence[int] | None = None,
    ) -> int | None:
        """As `submit`, of what the engine can read by itself; see the function `start`."""
        allowed = self.op.reductions
        if splits is not None or (allowed is not None and reduce_op not in allowed):
            return None
        prefix = self.op.prefix(self.grouped)
        root, prescale, postscale = root_number(root), float(prescale), float(postscale)
        site = _calls.sites.here()
        self._at = _At.DOOR
        handle: int | None = self._start(
            form,
            self.op.kind,
            prefix,
            self.name[len(prefix) + 1 :],
            self.unnamed,
            self._set,
            self.grouped,
            tensors,
            int(reduce_op),
            prescale,
            postscale,
            root,
            site,
        )
        self._at = _At.ADAPTER if handle is None else _At.ENGINE
        return handle

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
        site = _calls.sites.here()
        self._at = _At.DOOR
        handle: int = self.engine.submit(
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
            site,
            finish,
        )
        self._at = _At.ENGINE
        return handle


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
    number = _engine().next_number(_set_id(process_set, prefix), prefix)
    return f"{prefix}.noname.{number}"


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
    engine = _calls.engine
    try:
        if engine is not None:
            return bool(engine.poll(handle))
    except basics.Failure as failure:
        raise basics.translated(failure, pending_calls.get(handle, "poll")) from None
    except (TypeError, ValueError):
        pass  # no handle of this engine's
    raise ValueError(f"handle {handle!r} is unknown or was synchronized already")


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
        TypeError: the handle is no integer.
        HorovodInternalError: ranks disagree (`MismatchError`), a peer is lost (`PeerLostError`),
            or the engine stopped.
    """
    engine = _calls.engine
    if _debts.owed and not _debts.paying and handle in pending_calls:
        with paying():
            for finish in list(_debts.owed.values()):
                finish()
    return None if engine is None else basics.finish(engine, handle)


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
    _engine()
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
    _engine().renumber()


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
