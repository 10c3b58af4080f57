"""How long it takes to start: whole commands in turns; knows no job and no table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

LIMIT_S = 120

IMPORT = """
import time
start = time.perf_counter()
import horovod
print(time.perf_counter() - start)
"""


class CommandFailed(Exception):
    """A command didn't end well; the text says how."""


def commands(size: int) -> dict[str, list[str]]:
    """By row. One that prints a number prints the seconds that count."""
    python = sys.executable
    start = "import horovod.torch as hvd; hvd.init()"
    peer = "import torch.distributed as dist; dist.init_process_group('gloo')"
    elastic = [python, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    return {
        "horovodrun": [python, "-m", "horovod.runner", "-np", str(size), python, "-c", start],
        "torchrun": [*elastic, f"--nproc-per-node={size}", python, "-c", peer],
        "import torch": [python, "-c", "import torch"],
        "import horovod": [python, "-c", IMPORT],  # without the start of the interpreter
    }


def took_s(command: Sequence[str]) -> float:
    """Raises CommandFailed."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(str(error)) from error
    took = time.perf_counter() - begin
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise CommandFailed(": ".join([f"exit code {done.returncode}", *said]))
    try:
        return float(done.stdout) if done.stdout.strip() else took
    except ValueError as error:
        raise CommandFailed(f"it printed no number of seconds: {done.stdout[:80]!r}") from error


def take(size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each command in each round, and why commands failed."""
    taken: dict[str, list[float]] = {name: [] for name in commands(size)}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name, command in commands(size).items():
            if name in failed:
                continue
            try:
                taken[name].append(took_s(command))
            except CommandFailed as failure:
                failed[name] = str(failure)
    for launcher in ("horovodrun", "torchrun"):
        pairs = zip(taken[launcher], taken["import torch"], strict=False)
        taken[f"{launcher} - import torch"] = [whole - part for whole, part in pairs]
    return {name: samples for name, samples in taken.items() if samples}, failed
