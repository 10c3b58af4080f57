"""Jobs that take turns: one is told to measure while all others sleep; knows no library.

Each rank is connected through a Unix socket and sleeps in a read between its orders. Every wait has
a deadline, and every process that was started is ended by its own descriptor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from points import Point

START_S, ANSWER_S, END_S = 120.0, 60.0, 10.0
SHORT_S = 0.1  # of one call: such are measured several times to know how many make a turn
SLOW = 10  # times the seconds it should take, a peer has no more turns at a point


class JobFailed(Exception):
    """A job can't be used any more; the text says why."""


class Job:
    """The processes of one peer. They are being started when it is made; `connect` waits for them.

    `command` starts a program in all ranks, which gets the path of a socket and `arguments`.
    """

    def __init__(
        self,
        name: str,
        size: int,
        command: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
    ) -> None:
        self.name, self.size = name, size
        self.ways: dict[str, list[str]] = {}
        self.versions: dict[str, str] = {}
        self._log = log
        self._streams: list[Any] = []
        self._connections: list[socket.socket] = []
        self._processes: list[int] = []  # descriptors of ranks
        directory.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        path = directory / "socket"
        self._listener.bind(str(path))
        self._listener.listen(size)
        self._start_deadline = time.monotonic() + START_S
        with log.open("wb") as output:
            self._launcher = subprocess.Popen(
                [*command, str(path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # an interrupt is for the conductor, which ends all
            )

    def connect(self) -> None:
        """Waits until all ranks have been started. Raises JobFailed."""
        self._listener.settimeout(0.2)
        while len(self._streams) < self.size:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._launcher.poll() is not None:
                    raise self._failed("its launcher ended at once") from None
                if time.monotonic() > self._start_deadline:
                    raise self._failed(f"not started within {START_S:.0f} s") from None
                continue
            self._connections.append(connection)
            self._streams.append(connection.makefile("rw", encoding="utf-8"))
            hello = self._hear(len(self._streams) - 1, time.monotonic() + ANSWER_S)
            self._processes.append(os.pidfd_open(hello["pid"]))

    def join(self) -> None:
        """Has all ranks load their library and meet. Raises JobFailed."""
        replies = self.ask("join")
        if sorted(reply["rank"] for reply in replies) != list(range(self.size)):
            raise self._failed(f"its ranks are {[reply['rank'] for reply in replies]}")
        self.ways, self.versions = replies[0]["ways"], replies[0]["versions"]

    def ask(self, order: str, limit_s: float = ANSWER_S, **arguments: Any) -> list[dict[str, Any]]:
        """Gives all ranks an order and returns their answers. Raises JobFailed."""
        deadline = time.monotonic() + limit_s
        try:
            for stream in self._streams:
                stream.write(json.dumps([order, arguments]) + "\n")
                stream.flush()
        except OSError as error:
            raise self._failed(f"a rank is gone ({error})") from None
        return [self._hear(i, deadline) for i in range(len(self._streams))]

    def _hear(self, i: int, deadline: float) -> dict[str, Any]:
        self._connections[i].settimeout(max(0.01, deadline - time.monotonic()))
        try:
            line = self._streams[i].readline()
        except TimeoutError:
            raise self._failed("no answer in time") from None
        except OSError as error:
            raise self._failed(f"a rank is gone ({error})") from None
        if not line:
            raise self._failed("a rank ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._failed(reply["error"])
        return reply

    def _failed(self, reason: str) -> JobFailed:
        try:
            self._launcher.wait(2)  # for what it has to say of the end of its ranks
        except subprocess.TimeoutExpired:
            reason += "; its launcher goes on"
        lines = self._log.read_text(errors="replace").splitlines()
        said = [line.strip()[:200] for line in lines if line.strip()][-3:]
        return JobFailed("; ".join([reason, *said]))

    def end(self, politely: bool = True) -> None:
        """Ends all processes, whatever state they are in. May be called more than once."""
        if politely:
            try:
                self.ask("end", END_S)
            except JobFailed:
                politely = False
        self._listener.close()
        for closing in (*self._streams, *self._connections):
            try:
                closing.close()  # a rank that reads ends
            except OSError:
                continue  # what it still had to say is of no use to a rank that is gone
        try:
            self._launcher.wait(END_S if politely else 0.5)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
        try:
            self._launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        for process in self._processes:  # of launchers that don't take their ranks along
            try:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended
            finally:
                os.close(process)
        self._streams, self._connections, self._processes = [], [], []


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


class Turns:
    """Measures points in turns.

    Who fails is ended, with the reason in `failed`, and the others go on.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.jobs = {job.name: job for job in jobs}
        self.failed: dict[str, str] = {}
        for step in (Job.connect, Job.join):
            for job in list(self.jobs.values()):
                self._guarded(job, step, job)
        self.ways = {name: job.ways for name, job in self.jobs.items()}

    def _guarded(self, job: Job, function: Any, *arguments: Any, **named: Any) -> Any:
        """What the function returns, or None if the job has failed."""
        try:
            return function(*arguments, **named)
        except JobFailed as failure:
            self.failed[job.name] = str(failure)
            del self.jobs[job.name]
            job.end(politely=False)
            return None

    def take(
        self,
        point: Point,
        peers: Sequence[str],
        seconds: float,
        rounds: int,
    ) -> dict[tuple[str, str], list[float]]:
        """The samples of each peer and way: seconds of the slowest rank, or samples/s of all ranks.

        Each has `rounds` turns, and `seconds` in all, or fewer turns if one of its iterations takes
        longer than that. A sum is checked before it is timed.
        """
        rows = [
            (name, way)
            for name in peers
            if name in self.jobs
            for way in self.jobs[name].ways.get(point.kind, ())
        ]
        # What would fill more than half of the free memory is there for one turn only.
        needed_bytes = sum(point.size_bytes * self.jobs[name].size for name, _ in rows)
        keep = 2 * needed_bytes < available_bytes()
        taken: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
        once: dict[tuple[str, str], tuple[float, int]] = {}
        used_s = dict.fromkeys(rows, 0.0)
        for _ in range(rounds):
            for name, way in rows:
                job = self.jobs.get(name)
                if job is None or used_s[name, way] > SLOW * seconds:
                    continue
                begin = time.monotonic()
                arguments: dict[str, Any] = {"point": asdict(point), "way": way}
                if (name, way) not in once or not keep:
                    ready = self._guarded(job, job.ask, "prepare", **arguments)
                    if ready is None:
                        continue
                    once_s = max(reply["seconds"] for reply in ready)
                    if once_s < SHORT_S:
                        ran = self._guarded(job, job.ask, "run", **arguments, iterations=9)
                        if ran is None:
                            continue
                        once_s = max(statistics.median(reply["times"]) for reply in ran)
                    once.setdefault((name, way), (once_s, ready[0]["samples"]))
                once_s, samples = once[name, way]
                iterations = int(max(1, min(2000, seconds / rounds / once_s)))
                ran = self._guarded(
                    job,
                    job.ask,
                    "run",
                    ANSWER_S + 5 * iterations * once_s,
                    **arguments,
                    iterations=iterations,
                )
                if ran is None:
                    continue
                for times in zip(*(each["times"] for each in ran), strict=True):
                    taken[name, way].append(
                        sum(samples / s for s in times) if samples else max(times)
                    )
                used_s[name, way] += time.monotonic() - begin
                if not keep:
                    self._guarded(job, job.ask, "forget")
        for name in {name for name, _ in rows} & set(self.jobs):
            job = self.jobs[name]
            self._guarded(job, job.ask, "forget")
        return {row: samples for row, samples in taken.items() if samples}
