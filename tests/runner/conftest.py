"""Starts the launcher as users do, and looks for what a job left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

HOROVODRUN = (sys.executable, "-m", "horovod.runner")

# The same with short limits, where a test would else wait for 5 seconds and more.
HASTY = """
import dataclasses, sys
from horovod.runner import launch
from horovod.runner.lifecycle import Limits
run_job = launch.run_job
limits = Limits(grace_s=0.5, term_s=0.5)
launch.run_job = lambda spec: run_job(dataclasses.replace(spec, limits=limits))
sys.exit(launch.run_commandline())
"""


class Launcher:
    """Starts ``horovodrun`` with a temporary directory of its own for the job's directory."""

    hasty = (sys.executable, "-c", HASTY)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        names = ("HOROVOD_", "OMP_NUM_THREADS")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(names)}
        return {**kept, "TMPDIR": str(self.directory), **(extra or {})}

    def start(
        self,
        *words: str | bytes,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = HOROVODRUN,
        stdout: int = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*program, *words],
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        *words: str | bytes,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = HOROVODRUN,
        timeout_s: float = 30,
    ) -> subprocess.CompletedProcess[bytes]:
        process = self.start(*words, env=env, program=program)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def marked(self, mark: str) -> list[int]:
        """The live processes with ``mark`` in their environment."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                stat = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                if stat[0] != b"Z" and mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def left_behind(self) -> list[str]:
        """Files and processes of jobs that still exist."""
        files = [str(path) for path in self.directory.iterdir() if path.name.startswith("horovod-")]
        own = str(self.directory)
        return files + [f"process {pid}" for pid in self.marked(f"TMPDIR={own}\0")]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether ``condition`` became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    # Short: a socket's path must fit into 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hvd") as directory:
        launcher = Launcher(Path(directory))
        yield launcher
        launcher.close()
        assert until(lambda: launcher.left_behind() == [], 10), launcher.left_behind()


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], float], bool]:
    return until
