"""Long runs of engines in a process of their own, measured; prints one JSON object.

    python soak.py calls|"calls one by one"|cycles|"busy cycles"|idle

A script rather than a test, so that nothing that ran before is measured with it. Knows engines
wired as threads.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from engines import ALLGATHER, ALLREDUCE, BROADCAST, SUM, Rank, default_plan, engines, run

from horovod import _core

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
FOREIGN_THREADS = len(os.listdir("/proc/self/task")) - threading.active_count()  # as numpy's


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def voluntary_switches() -> int:
    total = 0
    for status in Path("/proc/self/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def calls(names: int = 20) -> dict[str, int]:
    """RSS after the first tenth of 10^5 calls, and how much it has grown at the end.

    So many names are in flight at once, again and again: on a busy machine a call takes as long as
    the scheduler lets it wait, and all in flight wait together.
    """
    rounds, settle = 100_000 // names, 10_000 // names
    rss: list[int] = []

    def body(rank: Rank) -> None:
        engine, memory = rank.engine, np.ones(names, np.float32)
        tensors = [
            [_core.View(address, address, 7, (1,))]
            for address in (memory.ctypes.data + 4 * np.arange(names)).tolist()
        ]
        for k in range(rounds):
            if k in (settle, rounds - 1) and rank.rank == 0:
                rss.append(rss_bytes())
            memory[:] = 1
            handles = [
                engine.submit(
                    ALLREDUCE, f"x{i}", 0, tensors[i], SUM, 1.0, 1.0, 0, None, False, memory
                )
                for i in range(names)
            ]
            for handle in handles:
                if not engine.wait(handle, 30.0) or engine.take(handle).kind:
                    raise AssertionError(f"a call of round {k} of rank {rank.rank} failed")

    with engines(2) as ranks:
        run(ranks, body, timeout_s=100)
    return {"rss_bytes": rss[0], "growth_bytes": rss[1] - rss[0]}


def settle_threads() -> None:
    """A thread that was joined is still listed for a moment."""
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > FOREIGN_THREADS + threading.active_count():
        if time.monotonic() > deadline:
            return  # one more thread that isn't Python's: the numbers will show it
        time.sleep(0.001)


def warm_up() -> None:
    """Fills the C library's cache of thread stacks, which would else grow with chance."""
    together = threading.Barrier(6)
    threads = [threading.Thread(target=together.wait) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def resources() -> dict[str, int]:
    gc.collect()
    settle_threads()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "maps": Path("/proc/self/maps").read_text().count("\n"),
        "rss_bytes": rss_bytes(),
    }


@contextmanager
def busy_cores() -> Iterator[None]:
    """As many other processes as cores, which never rest; they end with this one."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def cycles() -> dict[str, dict[str, int]]:
    """What the process holds after 10 and after 150 times init, 3 collectives, shutdown."""

    def body(rank: Rank) -> None:
        memory = np.ones(1000, np.float32)
        for kind in (ALLREDUCE, BROADCAST, ALLGATHER):
            rank.call(kind, "x", [memory])
        rank.engine.shutdown("", 5.0)

    warm_up()
    measured = {}
    plan = default_plan(outbox_bytes=1 << 20)
    for cycle in range(1, 151):
        with engines(2, plan) as ranks:
            run(ranks, body)
        del ranks
        if cycle in (10, 150):
            measured[str(cycle)] = resources()
    return measured


def busy_cycles() -> dict[str, dict[str, int]]:
    with busy_cores():
        return cycles()


def idle() -> dict[str, float]:
    """How often all threads of two engines wake up in a second in which nobody calls."""
    seconds = 4.0

    def body(rank: Rank) -> None:
        for _ in range(100):
            rank.allreduce("x", np.ones(10, np.float32))

    with engines(2) as ranks:
        run(ranks, body)
        time.sleep(0.5)  # what the last call left to do is done
        before, cpu = voluntary_switches(), time.process_time()
        time.sleep(seconds)
        after, cpu = voluntary_switches(), time.process_time() - cpu
    # The sleep of this thread is one of them.
    return {"wakeups_per_s": (after - before - 1) / seconds, "cpu": cpu / seconds}


def main() -> None:
    scenes: dict[str, Callable[[], object]] = {
        "calls": calls,
        "calls one by one": lambda: calls(names=1),
        "cycles": cycles,
        "busy cycles": busy_cycles,
        "idle": idle,
    }
    json.dump(scenes[sys.argv[1]](), sys.stdout)


if __name__ == "__main__":
    main()
