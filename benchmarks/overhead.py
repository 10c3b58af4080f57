"""Measures what small calls and small steps cost beside another checkout, and prints a table.

    python benchmarks/overhead.py --against ../older/src

Starts a job for each checkout in turn, several times, with one process and with two. A cell is the
fastest of many short batches in microseconds, which is the one number that other programs on the
machine hardly move. The row of tensors that aren't fused comes from a job of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARAMETERS = 161  # as many as ResNet-50 has
MANY = "1000 tensors of 4 KiB"

# What is timed; it gives the seconds that count, if those aren't all.
Timed = Callable[[], Any]


def eager(hvd: Any, torch: Any) -> dict[str, Timed]:
    """Blocking calls on 4 B, by what they are."""
    x = torch.ones(1)
    wanting = torch.ones(1, requires_grad=True)
    ten = [torch.ones(1) for _ in range(10)]
    return {
        "allreduce": lambda: hvd.allreduce(x),
        "allreduce, named": lambda: hvd.allreduce(x, name="x"),
        "allreduce, requires_grad": lambda: hvd.allreduce(wanting),
        "allreduce_": lambda: hvd.allreduce_(x),
        "allreduce_async_, synchronize": lambda: hvd.synchronize(hvd.allreduce_async_(x)),
        "grouped_allreduce of 10": lambda: hvd.grouped_allreduce(ten),
        "allgather": lambda: hvd.allgather(x),
        "broadcast_": lambda: hvd.broadcast_(x, 0),
    }


def sets(hvd: Any, torch: Any) -> dict[str, Timed]:
    """Small tensors that are all submitted before the first is waited for."""

    def reducing(count: int, size_bytes: int) -> Callable[[], float]:
        named = [(torch.ones(size_bytes // 4), f"{size_bytes}.{i}") for i in range(count)]

        def reduce() -> float:
            start = time.perf_counter()
            handles = [hvd.allreduce_async_(tensor, name=name) for tensor, name in named]
            submitting_s = time.perf_counter() - start
            for handle in handles:
                hvd.synchronize(handle)
            return submitting_s / count

        return reduce

    small, many = reducing(PARAMETERS, 1 << 10), reducing(1000, 4 << 10)
    return {
        f"submitting one of {PARAMETERS} tensors": small,
        f"{PARAMETERS} tensors of 1 KiB": lambda: small() and None,
        MANY: lambda: many() and None,
    }


def steps(hvd: Any, torch: Any) -> dict[str, Timed]:
    """A training step of many parameters of 1 KiB, by itself and distributed."""

    def training(wrap: Callable[..., Any]) -> Timed:
        layers = [torch.nn.Parameter(torch.ones(256)) for _ in range(PARAMETERS)]
        named = [(f"layer{i}.weight", layer) for i, layer in enumerate(layers)]
        optimizer = wrap(torch.optim.SGD(layers, lr=0.1), named)

        def train() -> None:
            optimizer.zero_grad()
            torch.stack(layers).sum().backward()
            optimizer.step()

        return train

    what = f"step of {PARAMETERS} parameters"
    return {
        f"{what}, not distributed": training(lambda optimizer, named: optimizer),
        what: training(hvd.DistributedOptimizer),
    }


def fastest_us(call: Timed, seconds: float, hvd: Any, torch: Any) -> float:
    """Of batches that last about 2 ms, on all ranks the same number of them."""
    for _ in range(20):
        call()
    start = time.perf_counter()
    for _ in range(20):
        call()
    once_s = hvd.allreduce(torch.tensor([time.perf_counter() - start]), name="once").item() / 20
    each = max(1, int(2e-3 / once_s))
    best = float("inf")
    for _ in range(max(5, int(seconds / (each * once_s)))):
        start = time.perf_counter()
        counting = [call() for _ in range(each)]
        whole_s = time.perf_counter() - start
        best = min(best, sum(counting) if isinstance(counting[0], float) else whole_s)
    return best / each * 1e6


def work(options: argparse.Namespace) -> None:
    """What each rank does; rank 0 leaves its times in a file."""
    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    calls = {**eager(hvd, torch), **sets(hvd, torch)}
    if hvd.size() > 1:
        calls.update(steps(hvd, torch))
    times = {
        name: fastest_us(call, options.seconds, hvd, torch)
        for name, call in calls.items()
        if options.only in name
    }
    if hvd.rank() == 0:
        Path(options.work).write_text(json.dumps(times), encoding="utf-8")
    hvd.shutdown()


def measure(source: Path, processes: int, options: argparse.Namespace) -> dict[str, float]:
    """Times of the checkout whose Python sources are in `source`."""
    times = job(source, processes, options, options.only)
    if MANY in times:
        apart = job(source, processes, options, MANY, HOROVOD_FUSION_THRESHOLD="0")
        times[f"{MANY}, not fused"] = apart[MANY]
    return times


def job(
    source: Path, processes: int, options: argparse.Namespace, only: str, **variables: str
) -> dict[str, float]:
    """Times of one job with these variables."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "times.json")
        script = [sys.executable, os.path.abspath(__file__), "--work", str(file)]
        script += ["--seconds", str(options.seconds), "--only", only]
        command = [sys.executable, "-m", "horovod.runner", "-np", str(processes), *script]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", **variables}
        subprocess.run(command, env=environment, check=True, timeout=300)
        times: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return times


def main() -> None:
    """Takes turns and prints the table; or is one rank."""
    found = importlib.util.find_spec("horovod")  # the current environment's
    if found is None or found.origin is None:
        sys.exit("horovod is not installed here: pip install .")
    here = Path(found.origin).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the folder src/ of a built checkout")
    parser.add_argument("-np", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=3, help="jobs for each checkout")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each call and job")
    parser.add_argument("--only", default="", help="calls whose description contains this")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    sources = [here, *([options.against.resolve()] if options.against else [])]
    for processes in options.np:
        best: list[dict[str, float]] = [{} for _ in sources]
        for _ in range(options.rounds):
            for source, known in zip(sources, best, strict=True):
                for name, time_us in measure(source, processes, options).items():
                    known[name] = min(time_us, known.get(name, time_us))
        print(f"\n| {processes} process(es) | us" + (" | other, us | ratio |" * (len(best) > 1)))
        print("|---|---" + "|---|---|" * (len(best) > 1))
        for name, time_us in best[0].items():
            others = [known[name] for known in best[1:]]
            cells = [f"{time_us:.1f}", *(f"{o:.1f} | {time_us / o:.2f}" for o in others)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
