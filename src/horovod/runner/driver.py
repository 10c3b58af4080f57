"""Runs one job from its first process to its last byte of output; knows no option and no host name.

One loop sleeps until something happens: output, the end of a worker, a signal, or a deadline.
Placements start the processes, ``lifecycle`` decides what is due, ``blame`` who failed first.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from horovod.common.store import Job, StoreServer, make_job
from horovod.runner import blame
from horovod.runner.blame import Exit
from horovod.runner.hosts import Slot
from horovod.runner.lifecycle import Action, Lifecycle, Limits, Phase
from horovod.runner.output import Console, LinePrefixer, RankFiles, Tail, asctime
from horovod.runner.placement import Ended, LocalPlacement, Placement, Program, Worker

_READ_BYTES = 64 << 10
_LINGER_S = 2.0  # for output of processes that outlive their rank
_LAST_WORDS_S = 2.0  # for a console that takes nothing, once we were told to stop
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class JobSpec:
    """What to run.

    Attributes:
        slots: the place of each rank.
        argv: the command, byte for byte.
        environment: what every worker gets; its place and the job's variables are added.
        output_directory: where each rank's output is also written.
        timestamps: whether forwarded lines begin with the time.
        foreground: the launcher is the whole program: SIGINT, SIGTERM and SIGHUP end the job, and
            the outcome is written to stderr. Only in the main thread.
        limits: how long ends may take.
    """

    slots: Sequence[Slot]
    argv: Sequence[bytes]
    environment: Mapping[bytes, bytes]
    output_directory: Path | None = None
    timestamps: bool = False
    foreground: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: 0, the exit code of the rank to blame, or 128 + n if signal n ended the launcher.
        text: what happened, in words; empty if the job succeeded.
        rank: the rank to blame, if one is.
    """

    code: int
    text: str
    rank: int | None = None


class Wakeup:
    """Ends the sleep of the loop from any thread or signal handler."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._open = True

    @property
    def writer(self) -> int:
        """The descriptor that the interpreter's signal handler writes to."""
        return self._writer

    def __call__(self) -> None:
        """Wakes the loop."""
        with self._lock:
            if self._open:
                with contextlib.suppress(BlockingIOError):  # it is full, so it wakes anyway
                    os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Takes what woke the loop."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass

    def close(self) -> None:
        """Closes the pipe; later calls do nothing."""
        with self._lock:
            self._open = False
            os.close(self.reader)
            os.close(self._writer)


class Interrupts:
    """What tells the launcher to stop, from before its first file to after its last byte.

    Lets every signal end the loop's sleep; else one that comes just before it would be overslept.
    In the foreground, takes what tells a launcher to stop, except what it was started to ignore
    (nohup). Elsewhere the caller's handlers run, and may raise.

    Args:
        foreground: whether the launcher is the whole program.

    Attributes:
        pending: the signals that came and were not dealt with, oldest first.
        wakeup: ends the loop's sleep.
    """

    def __init__(self, foreground: bool) -> None:
        self.pending: list[int] = []
        self.wakeup = Wakeup()
        self._foreground = foreground
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        self._undo.callback(self.wakeup.close)
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        before = signal.set_wakeup_fd(self.wakeup.writer, warn_on_full_buffer=False)
        self._undo.callback(signal.set_wakeup_fd, before)
        if before != -1:  # somebody's event loop, which we must not make deaf
            signal.set_wakeup_fd(before)
        for number in _SIGNALS if self._foreground else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._undo.callback(signal.signal, number, signal.signal(number, self._take))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)  # the interpreter has written to the wakeup's descriptor


class _Pipe:
    """One stream of one worker on its way to the console and to a file."""

    def __init__(self, worker: Worker, stream: str, timestamps: bool) -> None:
        self.descriptor = worker.pipes[stream]
        self.rank = worker.slot.rank
        self.stream = stream
        self.prefixer = LinePrefixer(self.rank, stream, asctime if timestamps else None)
        self.tail = Tail()


class Driver:
    """One job.

    Args:
        spec: what to run.
        job: the job's secrets and directory.
        server: the job's store, running.
        interrupts: what tells the launcher to stop, in force.
    """

    def __init__(
        self, spec: JobSpec, job: Job, server: StoreServer, interrupts: Interrupts
    ) -> None:
        self._spec = spec
        self._job = job
        self._server = server
        self._signals = interrupts.pending
        self._wakeup = interrupts.wakeup
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.reader, selectors.EVENT_READ)
        self._arrivals: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._life = Lifecycle(spec.limits)
        self._consoles: dict[str, Console] = {}
        self._paused: set[str] = set()
        self._pipes: list[_Pipe] = []
        self._tails: dict[int, Tail] = {}
        self._files: dict[int, RankFiles] = {}
        self._placement: Placement | None = None
        self._workers: Sequence[Worker] = ()
        self._exits: dict[int, Exit] = {}
        self._first_failed: int | None = None
        self._term_at: float | None = None
        self._interrupted = 0

    def run(self) -> Outcome:
        """Starts the job and returns when all of it has ended and its output is written.

        Raises:
            LaunchError: a process could not be started; none is left.
            OSError: a file for output could not be made.
        """
        try:
            for name in ("stderr", "stdout"):  # the first takes complaints about the second
                stream = getattr(sys, name)
                self._consoles[name] = Console(name, stream, self._wakeup, self._broken)
            try:
                self._start()
                self._loop()
            finally:
                self._close_placement()
            self._finish_output()
            outcome = self._outcome()
            if self._spec.foreground:
                self._say(outcome.text)
            self._close_consoles()
            return outcome
        finally:
            for console in self._consoles.values():
                console.close()
            self._selector.close()

    def _start(self) -> None:
        if self._spec.output_directory is not None:
            size = len(self._spec.slots)
            for slot in self._spec.slots:
                self._files[slot.rank] = RankFiles(
                    self._spec.output_directory, slot.rank, size, self._broken
                )
        self._placement = LocalPlacement(self._job.job_id, self._job.directory, self._ended)
        environment = {
            # First, so that a search for the job's processes finds it soon.
            b"HOROVOD_JOB_ID": self._job.job_id.encode(),
            **self._spec.environment,
            b"HOROVOD_STORE": os.fsencode(self._job.address),
            b"HOROVOD_JOB_KEY_FILE": os.fsencode(self._job.key_file),
            b"HOROVOD_CONTROLLER": b"gloo",
            b"HOROVOD_CPU_OPERATIONS": b"gloo",
            b"PYTHONUNBUFFERED": b"1",
        }
        environment[b"HOROVOD_JOB_ID"] = self._job.job_id.encode()
        self._workers = self._placement.start(
            self._spec.slots, Program(self._spec.argv, environment)
        )
        for worker in self._workers:
            for stream in worker.pipes:
                pipe = _Pipe(worker, stream, self._spec.timestamps)
                self._pipes.append(pipe)
                self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
                if stream == "stderr":
                    self._tails[worker.slot.rank] = pipe.tail

    # --- the loop ---

    def _loop(self) -> None:
        linger_until: float | None = None
        while True:
            now = time.monotonic()
            if self._all_ended:
                if linger_until is None:
                    linger_until = now + (_LINGER_S if self._term_at is None else 0.0)
                # Output that waits for a slow console is not given up.
                held = self._paused and not self._interrupted
                if not self._pipes or (now >= linger_until and not held):
                    return
            self._sleep(self._deadline(linger_until), now)
            self._take_signals()
            self._take_exits()
            self._act(self._life.tick(time.monotonic()))
            self._pause_or_resume()

    @property
    def _all_ended(self) -> bool:
        return len(self._exits) == len(self._workers) or self._life.phase is Phase.ABANDONED

    @property
    def _left(self) -> list[int]:
        return [w.slot.rank for w in self._workers if w.slot.rank not in self._exits]

    def _faults(self) -> dict[int, blame.Fault]:
        """What the ranks reported up to now; what can't be understood is left out."""
        reports = {
            int(key.partition("/")[2]): blame.parse_fault(value)
            for key, value in self._server.items("fault/").items()
            if key.partition("/")[2].isdigit()
        }
        return {rank: fault for rank, fault in reports.items() if fault is not None}

    def _deadline(self, linger_until: float | None) -> float | None:
        if linger_until is not None:
            return None if self._paused and not self._interrupted else linger_until
        return self._life.deadline

    def _sleep(self, deadline: float | None, now: float) -> None:
        timeout = None if deadline is None else max(0.0, deadline - now)
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._wakeup.clear()
            else:
                self._read(key.data)

    def _read(self, pipe: _Pipe) -> None:
        data = os.read(pipe.descriptor, _READ_BYTES)
        if data:
            pipe.tail.feed(data)
            self._forward(pipe, pipe.prefixer.feed(data))
            return
        self._forward(pipe, pipe.prefixer.finish())
        if pipe.stream not in self._paused:
            self._selector.unregister(pipe.descriptor)
        self._pipes.remove(pipe)

    def _forward(self, pipe: _Pipe, data: bytes) -> None:
        self._consoles[pipe.stream].put(data)
        if pipe.rank in self._files:
            self._files[pipe.rank].write(pipe.stream, data)

    def _pause_or_resume(self) -> None:
        """Leaves in the pipes what a slow console can't take, so that memory stays bounded."""
        for stream, console in self._consoles.items():
            if console.full == (stream in self._paused):
                continue
            for pipe in self._pipes:
                if pipe.stream == stream and console.full:
                    self._selector.unregister(pipe.descriptor)
                elif pipe.stream == stream:
                    self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
            self._paused ^= {stream}

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._interrupted = self._interrupted or number
            if not self._all_ended:
                self._say(f"horovodrun: {signal.Signals(number).name}: ending the job\n")
            self._act(self._life.interrupted(time.monotonic()))

    def _take_exits(self) -> None:
        arrived = False
        while not self._arrivals.empty():
            arrived = True
            ended = self._arrivals.get()
            by_launcher = self._term_at is not None and ended.time >= self._term_at
            self._exits[ended.rank] = Exit(ended.rank, ended.code, ended.time, by_launcher)
            self._server.end(ended.rank, blame.ending(ended.code))
            if ended.code == 0:
                continue
            self._say(f"Process {ended.rank} exit with status code {ended.code}.\n")
            if self._first_failed is None:
                self._first_failed = ended.rank
            if not self._all_ended:
                self._act(self._life.failed(time.monotonic()))
        if arrived and blame.given_up(self._left, self._faults()):
            self._act(self._life.failed(time.monotonic()))

    def _act(self, action: Action) -> None:
        if action is Action.NONE or self._all_ended or self._placement is None:
            return
        if action is Action.TERMINATE:
            if not self._interrupted:  # else that has been said
                self._say(self._terminating())
            self._term_at = time.monotonic()
            self._placement.signal(signal.SIGTERM)
            self._placement.signal(signal.SIGCONT)  # one that is stopped would never hear it
        elif action is Action.KILL:
            self._placement.signal(signal.SIGKILL)

    def _terminating(self) -> str:
        if self._first_failed is not None:
            return f"Terminating remaining workers after failure of Process {self._first_failed}.\n"
        left = ", ".join(f"Process {rank}" for rank in self._left)
        return f"Terminating {left}: lost by the others, which have ended.\n"

    # --- from other threads and signal handlers ---

    def _ended(self, ended: Ended) -> None:
        self._arrivals.put(ended)
        self._wakeup()

    def _broken(self, name: str, reason: str) -> None:
        """A console or file takes no more output; the job goes on."""
        text = f"horovodrun: {name}: {reason}; output for it is dropped from here on\n"
        if name != "stderr":
            self._consoles["stderr"].put(text.encode())

    # --- the end ---

    def _close_placement(self) -> None:
        """Ends what is left, then reads what it wrote before the pipes go."""
        if self._placement is None:
            return
        try:
            self._placement.end()
            self._read_rest()
        finally:
            self._placement.close()

    def _read_rest(self) -> None:
        """Reads what lies in the pipes now, without waiting for more."""
        for pipe in list(self._pipes):
            os.set_blocking(pipe.descriptor, False)
            try:
                while pipe in self._pipes and not self._consoles[pipe.stream].full:
                    self._read(pipe)
            except BlockingIOError:  # somebody still holds it open
                continue

    def _finish_output(self) -> None:
        for pipe in self._pipes:
            self._forward(pipe, pipe.prefixer.finish())
        for files in self._files.values():
            files.close()

    def _close_consoles(self) -> None:
        """Waits until all is written: as long as readers take, unless we were told to stop."""
        for console in self._consoles.values():
            console.close()
        limit: float | None = None
        while not all(console.done for console in self._consoles.values()):
            if (self._interrupted or self._signals) and limit is None:
                limit = time.monotonic() + _LAST_WORDS_S
            if limit is not None and time.monotonic() >= limit:
                return
            self._sleep(limit, time.monotonic())

    def _say(self, text: str) -> None:
        self._consoles["stderr"].put(text.encode("utf-8", "surrogateescape"))

    def _outcome(self) -> Outcome:
        if self._interrupted:
            name = signal.Signals(self._interrupted).name
            return Outcome(128 + self._interrupted, f"horovodrun: the job was ended by {name}\n")
        if len(self._exits) < len(self._workers):
            left = [w.pid for w in self._workers if w.slot.rank not in self._exits]
            return Outcome(1, f"horovodrun: these processes can't be killed: {left}\n")
        cause = blame.first_cause(list(self._exits.values()), self._faults())
        if cause is None:
            return Outcome(0, "")
        worker = next(w for w in self._workers if w.slot.rank == cause.rank)
        code = self._exits[cause.rank].code
        reason = cause.reason or blame.last_words(self._tails[cause.rank].data, code)
        lines = [
            f"{blame.DETECTED}. The first cause:",
            f"Process name: {cause.rank}",
            f"Exit code: {blame.code_text(code)}",
            f"Host: {worker.slot.hostname}, pid {worker.pid}",
            *([f"Reason: {reason}"] if reason else []),
            *([f"Note: {cause.note}"] if cause.note else []),
        ]
        return Outcome(cause.code, "\n".join(lines) + "\n", cause.rank)


def run_job(
    spec: JobSpec,
    before: Callable[[StoreServer], None] | None = None,
    after: Callable[[StoreServer], None] | None = None,
) -> Outcome:
    """Runs a job with a store and secrets of its own, and leaves nothing of it behind.

    Args:
        spec: what to run.
        before: called with the store before the first process starts.
        after: called with the store when all have ended.
    """
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(spec.foreground))
        job = make_job()
        stack.callback(job.remove)
        server = stack.enter_context(StoreServer(job.directory, job.key, job.job_id))
        if before is not None:
            before(server)
        outcome = Driver(spec, job, server, interrupts).run()
        if after is not None:
            after(server)
        return outcome
