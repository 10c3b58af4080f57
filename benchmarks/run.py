"""Measures this library beside its peers, in turns, and writes tables and plots.

    python benchmarks/run.py            everything
    python benchmarks/run.py --quick    a short form

README.md beside this file says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import commands
import report
from peers import PEERS, Absent, Place, install
from points import MIB, OPTIONAL, SUITES, Absence, Result, Suite
from turns import Job, JobFailed, Turns

HERE = Path(__file__).resolve().parent


@dataclass
class Session:
    """One call of this program: what was asked for, and what has come out so far."""

    options: argparse.Namespace
    load: str
    places: dict[str, Place] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def absent(self, np: int, peer: str, reason: str) -> None:
        self.absences.append(Absence(np, peer, reason))
        self.say(f"absent: {self.absences[-1]}")

    def say(self, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    def add(self, suite: Suite, np: int, row: str, column: str, samples: list[float]) -> None:
        self.results.append(Result(suite.name, np, row, column, samples))

    def install(self, names: Sequence[str]) -> None:
        """Before any job starts, since that has a deadline."""
        for name in names:
            if PEERS[name].packages:
                self.say(f"installing {name}, unless it is there")
            try:
                self.places[name] = install(name, self.options.environments)
            except Absent as absent:
                self.absent(0, name, str(absent))

    def start(self, name: str, np: int, directory: Path, stack: ExitStack) -> Job | None:
        """The job of a peer, which the stack ends; None if it isn't installed."""
        if name not in self.places:
            return None
        peer, place = PEERS[name], self.places[name]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        log = self.options.out / "logs" / f"{name}-np{np}.log"
        folder = Path(tempfile.mkdtemp(dir=directory)) / name
        job = Job(
            name,
            np,
            [*peer.launch(place, np), place.python, str(HERE / "rank.py")],
            [peer.adapter],
            {**threads, **place.variables, **peer.variables(place, np)},
            folder,
            log,
        )
        stack.callback(job.end)
        return job


def take_turns(session: Session, np: int, suites: Sequence[Suite], directory: Path) -> None:
    """All suites in which jobs take turns, on the same jobs."""
    options = session.options
    names = [name for name in options.peers if any(name in suite.peers for suite in suites)]
    with ExitStack() as stack:
        session.say(f"{np} processes each: starting {', '.join(names)}")
        jobs = [session.start(name, np, directory, stack) for name in names]
        turns = Turns(job for job in jobs if job is not None)
        for job in turns.jobs.values():
            told = ", ".join(f"{name} {version}" for name, version in job.versions.items())
            session.versions[f"versions of {job.name}"] = told
        for suite in suites:
            for point in suite.points:
                session.say(f"{suite.name}, {np} processes: {point.name}")
                taken = turns.take(
                    point,
                    [name for name in names if name in suite.peers],
                    options.seconds,
                    options.rounds,
                )
                for (peer, way), samples in taken.items():
                    # The first of several ways is the peer's own row.
                    row = peer if way == turns.ways[peer][point.kind][0] else f"{peer}, {way}"
                    session.add(suite, np, row, point.name, samples)
        for name, reason in turns.failed.items():
            session.absent(np, name, reason)


def take_memory(session: Session, np: int, suite: Suite, directory: Path) -> None:
    """One job after the other, since a page that two share would count half."""
    before, *stages = suite.points
    for name in session.options.peers:
        if name not in suite.peers:
            continue
        session.say(f"memory, {np} processes: {name}")
        with ExitStack() as stack:
            job = session.start(name, np, directory, stack)
            if job is None:
                continue

            def mib(job: Job = job) -> list[float]:
                return [reply["bytes"] / MIB for reply in job.ask("memory")]

            try:
                job.connect()
                first = mib()
                session.add(suite, np, name, before.name, first)
                job.join()
                for stage in stages:
                    if stage.counts:
                        way = job.ways[stage.kind][0]
                        job.ask("prepare", point=asdict(stage), way=way)
                    more = [now - then for now, then in zip(mib(), first, strict=True)]
                    session.add(suite, np, name, stage.name, more)
                    job.ask("forget")
            except JobFailed as failure:
                session.absent(np, name, str(failure))


def take_launch(session: Session, np: int, suite: Suite) -> None:
    session.say(f"launch, {np} processes")
    taken, failed = commands.take(np, session.options.launches)
    for row, samples in taken.items():
        session.add(suite, np, row, suite.points[0].name, samples)
    for row, reason in failed.items():
        session.absent(np, row, reason)


def facts(session: Session) -> dict[str, str]:
    """The head of the report."""
    told: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        told.setdefault(key.strip(), value.strip())
    cores = sorted(os.sched_getaffinity(0))
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "processor": told.get("model name", platform.machine()),
        "processors to run on": f"{len(cores)} of {os.cpu_count()}",
        "kernel": platform.release(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "load before": session.load,
        "Python": platform.python_version(),
    }
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    if siblings.is_file():  # a virtual machine may hide that there are any
        found["threads of the first core"] = siblings.read_text().strip()
    git = shutil.which("git")
    if git:
        described = subprocess.run(
            [git, "-C", str(HERE), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        if described.returncode == 0:
            found["revision"] = described.stdout.strip()
    return {**found, **session.versions}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures this library beside its peers.")
    parser.add_argument("--quick", action="store_true", help="short turns, 2 processes")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("-np", type=int, nargs="+", help="numbers of processes (2 4; quick: 2)")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=[name for name in PEERS if name not in OPTIONAL],
    )
    parser.add_argument("--points", nargs="+", help="only those whose names begin like this")
    parser.add_argument("--seconds", type=float, help="for each peer and point (2; quick: 0.3)")
    parser.add_argument("--rounds", type=int, help="turns for each peer and point (7; quick: 3)")
    parser.add_argument("--launches", type=int, help="of each command (5; quick: 2)")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder of the report")
    parser.add_argument(
        "--environments",
        type=Path,
        help="where peers with packages of their own are installed (OUT/environments)",
    )
    options = parser.parse_args()
    usual = {"np": [2, 4], "seconds": 2.0, "rounds": 7, "launches": 5}
    quick = {"np": [2], "seconds": 0.3, "rounds": 3, "launches": 2}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.out = options.out.resolve()
    options.environments = (options.environments or options.out / "environments").resolve()
    return options


def chosen(options: argparse.Namespace) -> list[Suite]:
    starts = tuple(options.points or [""])
    return [
        replace(
            suite,
            points=tuple(p for p in suite.points if p.kind == "none" or p.name.startswith(starts)),
        )
        for suite in (SUITES[name] for name in options.suite)
    ]


def measure(session: Session, np: int, suites: Sequence[Suite], directory: Path) -> None:
    in_turns = [suite for suite in suites if suite.name not in ("memory", "launch")]
    if in_turns:
        take_turns(session, np, in_turns, directory)
    for suite in suites:
        if suite.name == "memory":
            take_memory(session, np, suite, directory)
        elif suite.name == "launch":
            take_launch(session, np, suite)


def written(session: Session, suites: Sequence[Suite]) -> Path:
    """Writes the report and what it was made of, and returns the path of its page."""
    out, head = session.options.out, facts(session)
    raw = {
        "facts": head,
        "results": [asdict(result) for result in session.results],
        "absences": [asdict(absence) for absence in session.absences],
    }
    (out / "results.json").write_text(json.dumps(raw))
    return report.write(out, head, suites, session.results, session.absences)


def main() -> None:
    options = parsed()
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # after cleaning up
    session = Session(options, load=" ".join(f"{load:.2f}" for load in os.getloadavg()))
    suites = chosen(options)
    try:
        session.install([n for n in options.peers if any(n in suite.peers for suite in suites)])
        with tempfile.TemporaryDirectory() as temporary:
            for np in options.np:
                measure(session, np, suites, Path(temporary))
    finally:
        print(written(session, suites).read_text("utf-8"))


if __name__ == "__main__":
    main()
