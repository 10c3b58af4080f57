"""Measures allreduce beside other libraries, taking turns within one run, and prints tables.

    python benchmarks/allreduce.py -np 2 4

Starts one job for each number of processes. Each rank holds every library; for each size and model
they take turns in short rounds, so that whatever else the machine does meets all of them. An
iteration lasts as long as its slowest rank; a cell is the median over all rounds (10 % .. 90 %).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from peers import MODELS, PEERS, Peer

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = [4, KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB]

Times = dict[str, dict[str, list[float]]]  # point -> peer -> seconds of each iteration


# --------------------------------------------------------------------------------- one rank


def take_turns(
    calls: dict[str, tuple[Peer, Callable[[], None]]],
    budget_s: float,
    rounds: int,
    agree: Callable[[float], float],
) -> dict[str, list[float]]:
    """Times each call in `rounds` rounds, `budget_s` seconds for each peer in all."""
    counts = {}
    for name, (peer, call) in calls.items():
        for _ in range(3):
            call()
        peer.barrier()
        start = time.perf_counter()
        for _ in range(3):
            call()
        once_s = agree((time.perf_counter() - start) / 3)  # equal on all ranks, so counts are too
        counts[name] = int(max(2, min(1000, budget_s / rounds / max(once_s, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (peer, call) in calls.items():
            call()
            peer.barrier()
            for _ in range(counts[name]):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return times


def work(directory: Path, options: argparse.Namespace) -> None:
    """What each rank does: measures, and leaves its times in a file."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    peers = {name: PEERS[name](rank, size, directory) for name in options.peers}

    def agree(seconds: float) -> float:
        mean = torch.tensor([seconds / size])
        next(iter(peers.values())).reduce(mean)
        return float(mean)

    def check(name: str, tensor: torch.Tensor) -> None:
        expected = (size + 1) / 2 * (1 if peers[name].averages else size)
        if not bool((tensor == expected).all()):
            raise SystemExit(f"{name} computed a wrong sum")

    times: Times = {}
    for size_bytes in options.sizes:
        calls = {}
        for name, peer in peers.items():
            tensor = torch.full((size_bytes // 4,), float(rank + 1))
            peer.reduce(tensor)
            check(name, tensor)
            tensor.zero_()  # sums of zeros stay zero, however many iterations
            calls[name] = (peer, partial(peer.reduce, tensor))
        times[str(size_bytes)] = take_turns(calls, options.seconds, options.rounds, agree)
    for model in options.models:
        calls = {}
        for name, peer in peers.items():
            gradients = [torch.full((count,), float(rank + 1)) for count in MODELS[model]()]
            peer.prepare(gradients)
            peer.reduce_all()
            for gradient in gradients:
                check(name, gradient)
                gradient.zero_()
            calls[name] = (peer, peer.reduce_all)
        times[model] = take_turns(calls, options.seconds, options.rounds, agree)
    (directory / f"times.{rank}.json").write_text(json.dumps(times))
    for peer in peers.values():
        peer.barrier()
    for peer in peers.values():
        peer.close()


# --------------------------------------------------------------------------------- the driver


def run(processes: int, arguments: list[str]) -> Times:
    """Runs one job and returns, for each point and peer, the slowest rank of each iteration."""
    with tempfile.TemporaryDirectory() as directory:
        run_commandline = "from horovod.runner.launch import run_commandline as r; r()"
        launcher = [sys.executable, "-c", run_commandline, "-np", str(processes)]
        worker = [sys.executable, str(Path(__file__).resolve()), "--worker", directory]
        subprocess.run([*launcher, *worker, *arguments], check=True)
        ranks: list[Times] = [
            json.loads((Path(directory) / f"times.{rank}.json").read_text())
            for rank in range(processes)
        ]
    return {
        point: {
            peer: [max(each) for each in zip(*(rank[point][peer] for rank in ranks), strict=True)]
            for peer in ranks[0][point]
        }
        for point in ranks[0]
    }


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def title(point: str) -> str:
    if point in MODELS:
        counts = MODELS[point]()
        return f"{point}: {len(counts)} tensors, {sum(counts) * 4 / 1e6:.0f} MB"
    size_bytes = int(point)
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def table(processes: int, times: Times, peers: list[str]) -> str:
    """A Markdown table: a row a point, medians with their spread, and the ratio of each peer."""
    base, others = peers[0], peers[1:]
    head = ["float32", *peers, *(f"{other} / {base}" for other in others)]
    lines = [f"### {processes} processes", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for point, by_peer in times.items():
        cells = []
        for peer in peers:
            ordered = sorted(by_peer[peer])
            low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
            median = statistics.median(ordered)
            cells.append(f"{duration(median)} ({duration(low)} .. {duration(high)})")
        medians = {peer: statistics.median(by_peer[peer]) for peer in peers}
        cells += [f"{medians[other] / medians[base]:.2f}" for other in others]
        lines.append(f"| {title(point)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures allreduce beside other libraries, taking turns within one run."
    )
    parser.add_argument("-np", type=int, nargs="+", default=[2], help="numbers of processes")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=["horovod", "torch-gloo"],
        help="the first is what the others are compared with",
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES_BYTES, help="bytes")
    parser.add_argument(
        "--models",
        nargs="*",
        choices=MODELS,
        default=[],
        help="gradient sets, submitted tensor by tensor",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each point and peer")
    parser.add_argument("--rounds", type=int, default=5, help="turns for each point and peer")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    arguments = ["--seconds", str(options.seconds), "--rounds", str(options.rounds)]
    for name in ("peers", "sizes", "models"):
        arguments += [f"--{name}", *map(str, getattr(options, name))]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {os.uname().machine}", flush=True)
    for processes in options.np:
        print("\n" + table(processes, run(processes, arguments), options.peers), flush=True)


if __name__ == "__main__":
    main()
