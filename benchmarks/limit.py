"""The yard-stick: limit_shm.cc compiled, and run between turns; knows nothing else of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from peers import COMPILE_S, HERE, Absent, run

RUN_S = 120
TAKE_S = 10.0


def build(folder: Path) -> Path:
    """Raises Absent."""
    compiler = shutil.which("c++")
    if compiler is None:
        raise Absent("there is no C++ compiler")
    program = folder / "limit_shm"
    command = [compiler, "-O3", "-march=native", "-std=c++20", str(HERE / "limit_shm.cc")]
    run([*command, "-o", str(program)], COMPILE_S, "compiling limit_shm.cc")
    return program


def take_s(program: Path, size: int, size_bytes: int) -> float:
    """Seconds of an allreduce among `size` processes. Raises Absent."""
    try:
        done = subprocess.run(
            [str(program), str(size), str(size_bytes)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Absent(f"limit_shm: {error}") from error
    found = re.search(rf"^ *{size_bytes} B:.* allreduce +([\d.]+) us", done.stdout, re.M)
    if not found:
        raise Absent("limit_shm printed nothing that is known here")
    return float(found[1]) / 1e6


class Samples:
    """The yard-stick at one point: each call takes a sample, in seconds.

    One call is as good as many where it takes long, as it tries several ways itself: calls that
    follow those which took TAKE_S in all do nothing.
    """

    def __init__(self, program: Path, size: int, size_bytes: int) -> None:
        self.samples: list[float] = []
        self.failed = ""
        self._arguments = program, size, size_bytes
        self._used_s = 0.0

    def __call__(self) -> None:
        if self.failed or self._used_s > TAKE_S:
            return
        begin = time.monotonic()
        try:
            self.samples.append(take_s(*self._arguments))
        except Absent as absent:
            self.failed = str(absent)
        self._used_s += time.monotonic() - begin
