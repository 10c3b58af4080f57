"""Starts and ends this process's one engine and answers where it stands; must not know any tensor.

Only this file imports the core. A *world* is what one ``init()`` gives and ``shutdown()`` ends: the
settings, the engine, the connection to the job's store and the thread that passes the engine's
messages on. How a process ends is told to the others here as well: an uncaught exception is the
reason that peers and launcher hear, and a normal end leaves in good order.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from horovod import _core
from horovod.common import config, kinds, logs, wiring
from horovod.common.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rocm_built,
)
from horovod.common.config import Settings
from horovod.common.exceptions import (
    ForkedError,
    HorovodInternalError,
    PeerLostError,
    ResourceError,
    ShutdownError,
    StallError,
)
from horovod.common.store import StoreClient, StoreError, read_key

__all__ = [
    "Failure",
    "Form",
    "View",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "engine",
    "finish",
    "gloo_built",
    "gloo_enabled",
    "host_of",
    "init",
    "is_homogeneous",
    "is_initialized",
    "label",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "translated",
]

Failure = _core.Failure
Form: TypeAlias = _core.Form
View: TypeAlias = _core.View

# A rank's chunk of a segment: small enough that all slots stay in a cache, large enough that ranks
# which share a core need not change places too often.
_CHUNK_BYTES = 64 << 10
_MOST_SEGMENT_BYTES = 1 << 20
_LEAVE_S = 2.0  # how long an orderly shutdown waits for the others
_SETS_OF_A_RUN = 1 << 16  # numbers of process sets from those of one init() to those of the next
_RUNS = 1 << 14  # then they start again
_LAST_WORDS_S = 0.5  # the same when leaving because of an exception
_REPORT_S = 2.0  # the most that a report to the launcher may take


class Registrar(Protocol):
    """What ``process_sets`` does when a world begins and ends; it registers itself here."""

    def check(self, sets: Sequence[Any], size: int) -> list[list[int]]:
        """The ranks of each; ValueError if these can't be sets of a world of that size."""

    def started(self, size: int) -> None:
        """A world of that size begins."""

    def bind(self, sets: Sequence[Any], fresh: bool) -> None:
        """Registers the sets of ``init``, or finds them if the world isn't fresh."""

    def stopped(self) -> None:
        """The world ended: no set is registered any more."""


class _Watcher:
    """A thread that sleeps until the engine has something to say, and passes it on."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="horovod-watcher", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._stop)
            raise

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        poll.register(self._world.engine.message_fd(), select.POLLIN)
        while not any(descriptor == self._stop for descriptor, _ in poll.poll()):
            self._world.pass_on()

    def close(self) -> None:
        """Ends the thread after it has passed on what there is."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._world.pass_on()
        stop, self._stop = self._stop, -1
        os.close(stop)

    def abandon(self) -> None:
        """In a forked child, where there is no such thread."""
        if self._stop >= 0:
            os.close(self._stop)


@dataclass
class _World:
    """What one ``init()`` gave."""

    settings: Settings
    engine: Any
    store: StoreClient | None
    wires: wiring.Wires
    reported: bool = False
    leaving: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def host_of(self, rank: int) -> str | None:
        """The host of a rank, None if there is no such rank."""
        names = self.wires.names
        return names[rank].rpartition(" pid ")[0] if 0 <= rank < len(names) else None

    def pass_on(self) -> None:
        """Logs what the engine says, and reports to the launcher if it has failed."""
        for level, text in self.engine.take_messages():
            logs.LOGGER.log(level, text)
        failure = self.engine.failure()
        if failure is not None:
            kind, text, rank = failure
            lost = rank if rank >= 0 and rank != self.settings.rank else None
            # An orderly end is nobody's fault, and who leaves itself needs nobody any more.
            if kind != kinds.SHUTDOWN and not (self.leaving and lost is not None):
                self.report(lost, None, text)

    def leave(self) -> None:
        """Says what has happened up to now; that others go from here on is no loss any more."""
        self.pass_on()
        self.leaving = True

    def report(self, lost: int | None, exception: str | None, text: str) -> None:
        """Tells the launcher, once, why this rank can't go on.

        Args:
            lost: the rank whose loss this is a consequence of, None if the cause lies here.
            exception: the exception's last line, if there is one.
            text: in words.
        """
        with self.lock:
            if self.reported or self.store is None:
                return
            self.reported = True
        report = {"lost": lost, "exception": exception, "text": text, "time": time.monotonic()}
        try:
            self.store.set(f"fault/{self.settings.rank}", json.dumps(report).encode(), _REPORT_S)
        except StoreError as error:
            logs.LOGGER.info("the launcher could not be told of a fault: %s", error)


class _Runtime:
    """The state of this module, in one place so that a forked child can be made inert at once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while a world begins or ends
        self.world: _World | None = None
        self.watcher: _Watcher | None = None
        # How a forked child lets go of what a world holds; None before its start and after its end,
        # which are not the moments when `world` changes.
        self.held: list[Callable[[], None]] | None = None
        self.forked = False
        self.hooked = False
        self.registrar: Registrar | None = None


_runtime = _Runtime()
_door = _core.Door()  # for native adapters, through which they find whichever engine runs


def set_registrar(registrar: Registrar) -> None:
    """Lets ``process_sets`` take part in ``init`` and ``shutdown``."""
    _runtime.registrar = registrar
    if _runtime.world is not None:
        registrar.started(_runtime.world.settings.size)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Starts the engine and connects to all other processes of the job. All must call it.

    Blocks until every process has called it, at most HOROVOD_START_TIMEOUT seconds. A second call
    while the engine runs starts nothing. After ``shutdown()`` it may be called again.

    Args:
        comm: None, or a list of all ranks; sub-communicators need MPI and are not supported.
        process_sets: ``ProcessSet`` objects to register, the same on every rank and in the same
            order, or ``"dynamic"``, which is accepted: sets can always be added later.

    Raises:
        ValueError: ``comm`` or ``process_sets`` is wrong, or differs between ranks; or two sets
            have the same ranks, in which case the engine runs and a call with a valid list
            succeeds.
        HorovodInternalError: the processes could not be connected; the text says why. The
            subclasses ResourceError and PeerLostError say what was missing.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is {process_sets!r}: a list or "dynamic" is accepted')
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        process_sets = None
    sets = list(process_sets or ())
    with _runtime.lock:
        fresh = _runtime.world is None
        if _runtime.world is None or _runtime.forked:
            _start(comm, sets)
        else:
            _check_comm(comm, _runtime.world.settings.size)
    if sets:  # waits for the other ranks, so without the lock
        _registrar_for(sets).bind(sets, fresh)


def _registrar_for(sets: Sequence[Any]) -> Registrar:
    if _runtime.registrar is None:
        raise ValueError(f"process_sets must hold ProcessSet objects, not {type(sets[0]).__name__}")
    return _runtime.registrar


def _check_comm(comm: Any, size: int) -> None:
    if comm is None:
        return
    if not isinstance(comm, Iterable):
        raise ValueError(
            f"comm is a {type(comm).__name__}: MPI communicators are not supported, give None or "
            f"the list of all ranks"
        )
    ranks = list(comm)
    if ranks and sorted(ranks) != list(range(size)):
        raise ValueError(
            f"comm is {ranks}: only None or all ranks, 0 to {size - 1}, are supported; use "
            f"process_sets for groups of ranks"
        )


def _start(comm: Any, sets: Sequence[Any]) -> None:
    if _runtime.forked:
        raise _forked_error()
    settings = config.from_environ()
    foreign = config.foreign_launcher()
    if foreign is not None:
        raise HorovodInternalError(foreign)
    if settings.size > 1 and settings.store is None:
        raise HorovodInternalError(
            f"HOROVOD_SIZE={settings.size} but HOROVOD_STORE is not set, so the other processes "
            f"can't be found: start the job with `horovodrun -np {settings.size} python train.py`, "
            f"or unset the HOROVOD_* variables if this process is meant to be on its own"
        )
    _check_comm(comm, settings.size)
    ranks_of_sets = _registrar_for(sets).check(sets, settings.size) if sets else []
    logs.configure(settings.log_level, settings.log_hide_time, settings.rank)
    _runtime.held = held = []
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, _runtime, "held", None)
        store = _open_store(settings)
        if store is not None:
            undo.callback(store.close)
        plan = _plan(settings)
        if settings.size == 1 or store is None:
            wires = wiring.world_of_one(settings, plan)
        else:
            memory_bytes = _core.segment_bytes(settings.size, plan["outbox_bytes"])
            wires = wiring.connect(settings, plan, memory_bytes, store, ranks_of_sets)
        try:
            core = _make_engine(settings, wires)
        finally:
            wires.close()  # the engine has duplicates of its own
        held.append(core.abandon)
        undo.callback(core.shutdown, "init() failed", _LAST_WORDS_S)
        undo.callback(_door.close)
        _door.open(core, settings.rank, settings.size, settings.local_rank, settings.local_size)
        world = _World(settings, core, store, wires)
        try:
            watcher = _Watcher(world)
        except (OSError, RuntimeError) as error:
            raise ResourceError(f"[horovod] init: no thread for messages: {error}") from error
        held.append(watcher.abandon)
        undo.pop_all()
    _install_hooks()
    _runtime.world, _runtime.watcher = world, watcher
    if _runtime.registrar is not None:
        _runtime.registrar.started(settings.size)


def _open_store(settings: Settings) -> StoreClient | None:
    if settings.store is None:
        return None
    if settings.job_key_file is None or settings.job_id is None:
        raise HorovodInternalError(
            "HOROVOD_STORE is set but HOROVOD_JOB_KEY_FILE or HOROVOD_JOB_ID is not: the launcher "
            "sets all three, and all of them must reach the process"
        )
    key = read_key(settings.job_key_file)
    return StoreClient(settings.store, key, settings.job_id, settings.rank)


def _plan(settings: Settings) -> dict[str, int]:
    """What shapes every schedule; rank 0's is used by all."""
    segment_bytes = min(_CHUNK_BYTES * settings.size, _MOST_SEGMENT_BYTES)
    return {
        "fusion_threshold_bytes": settings.fusion_threshold_bytes,
        "cycle_time_us": round(settings.cycle_time_ms * 1000),
        "segment_bytes": segment_bytes,
        "outbox_bytes": 8 * segment_bytes,  # four fit each of its halves
        "cache_capacity": settings.cache_capacity,
        "join_all_ops": int(settings.join_all_ops),
        "disable_group_fusion": int(settings.disable_group_fusion),
    }


def _make_engine(settings: Settings, wires: wiring.Wires) -> Any:
    local = {
        "segments": wires.segments,
        "doorbells": wires.doorbells,
        "sockets": wires.sockets,
        "pidfds": wires.pidfds,
    }
    options = {
        "simd": settings.simd,
        "stores": settings.shm_stores,
        "stall_check": int(settings.stall_check_enabled),
        "stall_warning_s": settings.stall_warning_s,
        "stall_shutdown_s": settings.stall_shutdown_s,
        "deadlock_s": settings.deadlock_s,
        "heartbeat_s": settings.heartbeat_s,
        # A graph that was traced in an earlier run must find no set, rather than another one.
        "first_set": wires.generation % _RUNS * _SETS_OF_A_RUN + 1,
    }
    try:
        return _core.Engine(settings.rank, settings.size, wires.names, local, wires.plan, options)
    except Failure as failure:
        raise translated(failure, "init") from failure


def reason(error: BaseException) -> str:
    """What the other ranks are told of a call that failed here before the engine had it."""
    return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()


def translated(failure: _core.Failure, op: str = "") -> Exception:
    """The Python exception for what a call of the engine raised.

    Any thread may ask, also amid a shutdown.

    Args:
        failure: what was raised.
        op: what to call the operation; its full name, which the failure then knows, if empty.
    """
    kind, text, rank, *named = failure.args
    world = _runtime.world  # read once: another thread may be ending it
    host = None if world is None else world.host_of(rank)
    return kinds.exception(kind, text, rank, host, op or "".join(named))


def finish(engine: Any, handle: int, op: str = "") -> Any:
    """Waits for one of the engine's calls and gives what it came to, once; None afterwards.

    Args:
        engine: the engine that the call was given to, which may have been shut down since.
        handle: the engine's own.
        op: see `translated`, as for the errors.

    Raises:
        HorovodInternalError: the call failed, or the engine can't be waited for.
    """
    try:
        return engine.finish(handle)
    except Failure as failure:
        raise translated(failure, op) from None


def label() -> str:
    """How messages of this rank begin: ``[horovod rank/size]``, ``[horovod]`` without a world."""
    world = _runtime.world
    if world is None:
        return "[horovod]"
    return f"[horovod {world.settings.rank}/{world.settings.size}]"


def shutdown() -> None:
    """Ends the engine in good order: what all ranks agreed on still runs.

    Operations of this rank that can't complete any more raise HorovodInternalError where they are
    waited for; so do those of other ranks that need this one. Blocks for at most a few seconds.
    Does nothing if the engine isn't running. All ranks should call it.
    """
    _end("", _LEAVE_S)


def _end(reason: str, timeout_s: float, patience_s: float = -1) -> None:
    """Ends the world.

    Args:
        reason: why this rank leaves; empty for an end in good order.
        timeout_s: how long that may take.
        patience_s: how long to wait for a thread that is in ``init()`` or ``shutdown()``, which are
            bounded themselves; negative waits for their end.
    """
    if not _runtime.lock.acquire(timeout=patience_s):
        return
    try:
        world, watcher = _runtime.world, _runtime.watcher
        _runtime.world, _runtime.watcher = None, None
        if world is None or _runtime.forked:
            return
        try:
            _door.close()
            world.leave()
            world.engine.shutdown(reason, timeout_s)
        finally:
            if watcher is not None:
                watcher.close()
            if world.store is not None:
                world.store.close()
            _runtime.held = None
            if _runtime.registrar is not None:
                _runtime.registrar.stopped()
    finally:
        _runtime.lock.release()


def is_initialized() -> bool:
    """Whether ``init()`` has completed and ``shutdown()`` was not called since.

    It stays true when another rank ended the job, until this process calls ``shutdown()``.
    """
    return _runtime.world is not None


def engine() -> Any:
    """The running engine.

    Raises:
        ForkedError: this process is a forked child of one that called ``init()``.
        ShutdownError: ``init()`` was not called, or ``shutdown()`` was.
    """
    world = _runtime.world
    if _runtime.forked:
        raise _forked_error()
    if world is None:
        raise ShutdownError("horovod is not initialized: call init() first")
    return world.engine


def door_address() -> int:
    """Where native code finds whichever engine runs; the same for the life of the process."""
    return int(_door.address)


def _forked_error() -> ForkedError:
    return ForkedError(
        "this process was forked from one that had called init(), and the connections to the other "
        "ranks stay with the parent: call horovod there, or start this process with the spawn or "
        "forkserver method"
    )


def _world() -> _World:
    world = _runtime.world
    if world is None:
        raise ValueError("horovod is not initialized: call init() first")
    return world


def rank() -> int:
    """This process's number among all processes, 0 to ``size()`` - 1.

    Like all questions about the placement it is answered in forked children too, so that data
    loaders can ask. Raises ValueError before ``init()``.
    """
    return _world().settings.rank


def size() -> int:
    """How many processes there are. Raises ValueError before ``init()``."""
    return _world().settings.size


def local_rank() -> int:
    """This process's number among those of its host. Raises ValueError before ``init()``."""
    return _world().settings.local_rank


def local_size() -> int:
    """How many processes this host has. Raises ValueError before ``init()``."""
    return _world().settings.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process with this process's local rank.

    Raises ValueError before ``init()``.
    """
    return _world().settings.cross_rank


def cross_size() -> int:
    """How many hosts have a process with this process's local rank.

    Raises ValueError before ``init()``.
    """
    return _world().settings.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes. Raises ValueError before ``init()``."""
    return len(set(collections.Counter(_world().wires.hosts).values())) == 1


def host_of(rank: int) -> str | None:
    """The host of a rank, None if there is no such rank. Raises ValueError before ``init()``."""
    return _world().host_of(rank)


def mpi_threads_supported() -> bool:
    """Always raises ValueError: MPI isn't used."""
    _world()
    raise ValueError("MPI is not enabled in this run, so it has no threading support to ask for")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raises ValueError: this version can't record a timeline."""
    _no_timeline("start_timeline")


def stop_timeline() -> None:
    """Raises ValueError: this version can't record a timeline."""
    _no_timeline("stop_timeline")


def _no_timeline(name: str) -> None:
    _world()
    raise ValueError(
        f"{name}() needs a process that was started with HOROVOD_TIMELINE set to a path or to "
        f"DYNAMIC, and this version of horovod does not record timelines yet"
    )


# --- how the process ends ---


def _install_hooks() -> None:
    """Takes part, once per process, in its end and its uncaught exceptions."""
    if _runtime.hooked:
        return
    _runtime.hooked = True
    atexit.register(_at_exit)
    previous = sys.excepthook

    def report_then_go_on(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            _leave_because_of(error)
        finally:
            previous(kind, error, trace)

    sys.excepthook = report_then_go_on


def _leave_because_of(error: BaseException) -> None:
    """Tells launcher and peers of the uncaught exception that ends this process."""
    world = _runtime.world
    if world is None or _runtime.forked or hasattr(sys, "ps1"):  # a prompt goes on after an error
        return
    line = _words(error)
    lost = _lost_rank(error, world.settings.rank)
    if lost is None:
        lost = _lost_by_engine(world, line)
    world.report(lost, line, line)
    _end(line, _LAST_WORDS_S, _LAST_WORDS_S)


def _words(error: BaseException) -> str:
    """What the traceback of an exception ends with.

    A framework that carries our error out of a graph puts pages around it: then it is our line.
    """
    text = traceback.format_exception_only(error)[-1].strip()
    kind, _, _ = text.partition(":")
    ours = [line.strip() for line in text.splitlines()[1:] if "[horovod " in line]
    return f"{kind}: {ours[0]}" if ours else text


def _lost_by_engine(world: _World, text: str) -> int | None:
    """The rank that the engine lost, if a framework's own exception tells of that."""
    failure = world.engine.failure()
    if failure is None:
        return None
    _, why, rank = failure
    return rank if rank not in (-1, world.settings.rank) and why in text else None


def _lost_rank(error: BaseException | None, own: int) -> int | None:
    """The rank whose loss led to the exception, even if the user raised another one over it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (PeerLostError, ShutdownError, StallError)):
            return None if error.rank in (None, own) else error.rank
        error = error.__cause__ or error.__context__
    return None


def _at_exit() -> None:
    """Leaves in good order, or names the exception if a foreign hook kept ours from doing so."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        _leave_because_of(error)
    _end("", _LEAVE_S, _LEAVE_S)


def _after_fork_in_child() -> None:
    """Makes the child inert, also if another thread of the parent was in init() or shutdown().

    Store clients and wires see to their own descriptors.
    """
    _runtime.lock = threading.RLock()  # a thread that does not exist here may hold the old one
    if _runtime.held is None or _runtime.forked:
        return
    _runtime.forked = True
    for let_go in _runtime.held:
        let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)  # before any thread can be in init()
