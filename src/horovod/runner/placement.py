"""Starts a job's processes and watches them end; knows nothing of what ends a job or why.

A :class:`Placement` starts every slot and returns workers that can be read and signalled. This file
has the one for this machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from horovod.common import config
from horovod.runner import guardian
from horovod.runner.hosts import Host, Slot

_RESOLVE_S = 5.0
_GUARDIAN_S = 2.0
_KERNEL_STRING_BYTES = 32 * 4096  # MAX_ARG_STRLEN
_KERNEL_TOTAL_BYTES = 6 << 20  # three quarters of _STK_LIM
_FEWEST_TOTAL_BYTES = 128 << 10


class LaunchError(Exception):
    """A process could not be started.

    Args:
        text: what went wrong, in words.
        code: what the launcher ends with: 126 for a command that can't be run, 127 for one that
            is not there, else 1.
    """

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Program:
    """What to start in every slot: bytes, as they came, never through a shell."""

    argv: Sequence[bytes]
    environment: Mapping[bytes, bytes]


@dataclass(frozen=True)
class Ended:
    """A worker's end: exit code, 128 + n for signal n, and the monotonic time."""

    rank: int
    code: int
    time: float


class Worker(Protocol):
    """A started process."""

    @property
    def slot(self) -> Slot:
        """Its place."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def pipes(self) -> Mapping[str, int]:
        """Descriptors to read ``stdout`` and ``stderr`` from."""


class Placement(Protocol):
    """Where the processes of a job run."""

    def start(self, slots: Sequence[Slot], program: Program) -> Sequence[Worker]:
        """Starts all slots.

        Raises:
            LaunchError: one of them could not be started; :meth:`end` ends those before it.
        """

    def signal(self, number: int) -> int:
        """Sends a signal to every process of the job, and returns how many there were."""

    def end(self) -> None:
        """Ends every process that is left of the job, also what ranks left behind."""

    def close(self) -> None:
        """Releases everything; comes after :meth:`end`."""


class LocalWorker:
    """A process of this machine, leader of a session of its own."""

    def __init__(self, slot: Slot, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.slot = slot
        self.process = process
        self.pid = process.pid
        self.pipes = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno()}

    def wait_unreaped(self) -> int:
        """Blocks until the process ends and leaves it a zombie, so that its pid stays taken.

        While it is, no stranger can get the number that marks the session of the worker.
        """
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # somebody else reaped it, or SIGCHLD is ignored
            return 1
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status

    def release(self) -> None:
        """Closes the pipes and reaps the process if it has ended."""
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it can't be killed: not ours to wait
            self.process.wait(0)


class LocalPlacement:
    """Processes of this machine, each in a session of its own, watched by a guardian.

    The guardian is a small process that outlives the launcher and ends the job if the launcher is
    killed. If the guardian is killed, another one is started.

    Args:
        job_id: marks the job's processes.
        directory: the job's directory, which the guardian removes after the launcher's death.
        ended: called from another thread when a worker ends.
    """

    def __init__(self, job_id: str, directory: Path, ended: Callable[[Ended], None]) -> None:
        self._job_id = job_id
        self._directory = directory
        self._ended = ended
        self._workers: list[LocalWorker] = []
        self._guardian = Guardian(job_id, directory)

    def start(self, slots: Sequence[Slot], program: Program) -> Sequence[LocalWorker]:
        """Starts all slots."""
        for slot in slots:
            worker = LocalWorker(slot, self._spawn(slot, program))
            self._workers.append(worker)
            self._guardian.tell(worker.pid)
        for worker in self._workers:
            name = f"horovod-wait-{worker.slot.rank}"
            threading.Thread(target=self._watch, args=(worker,), name=name, daemon=True).start()
        return self._workers

    def _spawn(self, slot: Slot, program: Program) -> subprocess.Popen[bytes]:
        environment = {**program.environment, **slot.variables()}
        try:
            return subprocess.Popen(
                list(program.argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise _launch_error(error, program.argv, environment, slot) from error
        except ValueError as error:  # a NUL byte
            raise LaunchError(f"the command can't be started: {error}", 126) from error

    def _watch(self, worker: LocalWorker) -> None:
        code = worker.wait_unreaped()
        self._ended(Ended(worker.slot.rank, code, time.monotonic()))

    def signal(self, number: int) -> int:
        """Sends a signal to every process of the job, and returns how many there were."""
        return guardian.signal_job(self._job_id, self._sessions(), number)

    def end(self) -> None:
        """Ends every process that is left of the job, also what ranks left behind."""
        guardian.end_job(self._job_id, self._sessions())

    def close(self) -> None:
        """Closes pipes, reaps, and releases the guardian; no signal may be sent after it."""
        for worker in self._workers:
            worker.release()
        self._guardian.release()

    def _sessions(self) -> Collection[int]:
        return {worker.pid for worker in self._workers}


class Guardian:
    """The launcher's side of the process in ``guardian.py``, started again if it is killed."""

    _RESTARTS = 5

    def __init__(self, job_id: str, directory: Path) -> None:
        self._command = [job_id, os.fspath(directory)]
        self._lock = threading.Lock()
        self._told = b""
        self._closed = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep, name="horovod-guardian", daemon=True)
        self._thread.start()

    def tell(self, session: int) -> None:
        """Names a session to be ended if the launcher is killed."""
        with self._lock:
            line = f"{session}\n".encode()
            self._told += line
            self._write(line)

    def release(self) -> None:
        """Ends the process: there is nothing left to guard."""
        with self._lock:
            self._closed = True
            self._write(guardian.RELEASE)
            process = self._process
        # The thread sleeps until the process ends; Popen.wait() with a limit would poll for it.
        self._thread.join(_GUARDIAN_S)
        if self._thread.is_alive():
            process.kill()
            self._thread.join(_GUARDIAN_S)
        assert process.stdin is not None
        process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        program = os.path.abspath(guardian.__file__)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", program, str(os.getpid()), *self._command],
            env=config.helper_environment(),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def _keep(self) -> None:
        """Starts another guardian whenever one ends without having been released."""
        reason = f"it ended {self._RESTARTS} times"
        for _ in range(self._RESTARTS):
            self._process.wait()
            with self._lock:
                if self._closed:
                    return
                try:
                    self._process = self._start()
                except OSError as error:
                    reason = f"it can't be started again: {error}"
                    break
                self._write(self._told)
        else:
            self._process.wait()
            if self._closed:
                return
        sys.stderr.write(
            f"horovodrun: if the launcher is killed, nobody will end the job: the process that "
            f"should is gone, {reason}\n"
        )

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: _keep starts another one
            self._process.stdin.write(data)


def _launch_error(
    error: OSError, argv: Sequence[bytes], environment: Mapping[bytes, bytes], slot: Slot
) -> LaunchError:
    """Says in words why a process could not be started."""
    name = os.fsdecode(argv[0])
    if error.errno == errno.E2BIG:
        return LaunchError(_too_big_text(argv, environment), 126)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return LaunchError(f"{name}: command not found", 127)
    if error.errno == errno.ENOEXEC:
        return LaunchError(f"{name}: is neither a program nor a script with a #! line", 126)
    if error.errno == errno.EACCES:
        return LaunchError(f"{name}: permission denied", 126)
    advice = {
        errno.EAGAIN: "too many processes (ulimit -u)",
        errno.ENOMEM: "not enough memory",
        errno.EMFILE: "too many open files in the launcher (ulimit -n)",
        errno.ENFILE: "too many open files on this machine",
    }.get(error.errno or 0, error.strerror or str(error))
    return LaunchError(f"rank {slot.rank} can't be started: {advice}")


def _too_big_text(argv: Sequence[bytes], environment: Mapping[bytes, bytes]) -> str:
    strings = [(os.fsdecode(name), len(name) + len(text) + 2) for name, text in environment.items()]
    arguments = sum(len(argument) + 1 for argument in argv)
    total = sum(size for _, size in strings)
    name, largest = max(
        [*strings, *((f"argument {i}", len(a) + 1) for i, a in enumerate(argv))],
        key=lambda item: item[1],
    )
    if largest > _KERNEL_STRING_BYTES:
        return (
            f"the command can't be started: {name} takes {largest} bytes, and the kernel takes at "
            f"most {_KERNEL_STRING_BYTES} for one argument or variable"
        )
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    quarter = _KERNEL_TOTAL_BYTES if stack == resource.RLIM_INFINITY else stack // 4
    limit = max(min(quarter, _KERNEL_TOTAL_BYTES), _FEWEST_TOTAL_BYTES)
    return (
        f"the command can't be started: environment ({total} bytes in {len(strings)} variables, "
        f"the largest {name}) and arguments ({arguments} bytes) are too large; the kernel takes "
        f"{limit} bytes, a quarter of the stack limit and at most {_KERNEL_TOTAL_BYTES}: raise it "
        f"with `ulimit -s` (in KiB, here {'unlimited' if stack < 0 else stack // 1024}) or make "
        f"them smaller"
    )


def remote_hosts(hosts: Sequence[Host], resolve_s: float = _RESOLVE_S) -> list[str]:
    """The names among ``hosts`` that don't mean this machine; asks a resolver only if it must.

    A name that can't be resolved within ``resolve_s`` seconds counts as remote.
    """
    deadline = time.monotonic() + resolve_s
    return [host.name for host in hosts if host.slots and not is_local(host.name, deadline)]


def is_local(name: str, deadline: float) -> bool:
    """Whether a host's name or address is this machine's."""
    if name.lower() in ("localhost", "localhost.localdomain", socket.gethostname().lower()):
        return True
    found: list[str] = []

    def resolve() -> None:
        with contextlib.suppress(OSError, UnicodeError):  # unknown, or too long for a name
            found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(name, 0))

    thread = threading.Thread(target=resolve, name="horovod-resolve", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    return any(_is_own_address(address) for address in found)


def _is_own_address(address: str) -> bool:
    """Whether the kernel would reach ``address`` from that very address. Sends nothing."""
    if address.startswith("127.") or address == "::1":
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0]).partition("%")[0] == address.partition("%")[0]
    except OSError:
        return False


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
