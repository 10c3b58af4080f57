"""Measures a compiled model's step with gradients reduced at the end and inside its backward pass.

    python benchmarks/overlap.py -np 2

Each rank holds three copies of a model: not reduced, reduced by hooks, and with `hvd.overlap`. They
take turns step by step; a step lasts as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

import horovod.torch as hvd

WAYS = ("no reduction", "hooks", "overlap")


def prepare(way: str, args: argparse.Namespace, starts: list[float]) -> Any:
    """A function that makes one step and notes when reductions start."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(args.width, args.width) for _ in range(args.layers)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.Tanh())))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped: torch.nn.Module = model
    if way != "no reduction":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        start = optimizer.reducer._start

        def noted(bucket: Any) -> None:
            starts.append(time.perf_counter())
            start(bucket)

        optimizer.reducer._start = noted
    if way == "overlap":
        wrapped = hvd.overlap(model, optimizer)
    compiled = torch.compile(wrapped, backend=args.backend, fullgraph=True)
    x = torch.randn(args.batch, args.width)

    def step() -> float:
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        starts.clear()
        begin = time.perf_counter()
        loss.backward()
        optimizer.step()
        return begin

    return step


def measure(args: argparse.Namespace) -> None:
    """Runs in every rank."""
    hvd.init()
    starts: list[float] = []
    steps = {way: prepare(way, args, starts) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    spans: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(3 + args.steps):
        for way, step in steps.items():
            hvd.barrier()
            begin = time.perf_counter()
            backward = step()
            spent = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            longest = hvd.allreduce(spent, op=hvd.Max).item()
            if turn < 3:  # compiles, and overlap watches one window
                continue
            times[way].append(longest)
            if starts:
                spans[way].append((starts[0] - backward, starts[-1] - backward))
            starts.clear()
    if hvd.rank() == 0:
        print(
            f"{args.layers} layers of {args.width}, batch {args.batch}, {hvd.size()} processes, ms"
        )
        print("| way | step | starts, from the beginning of backward |\n|---|---|---|")
        for way in WAYS:
            first, last = (
                [1e3 * statistics.median(column) for column in zip(*spans[way], strict=True)]
                if spans[way]
                else (float("nan"), float("nan"))
            )
            step_ms = 1e3 * statistics.median(times[way])
            print(f"| {way} | {step_ms:.1f} | {first:.1f} .. {last:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    if "HOROVOD_RANK" in os.environ:
        measure(args)
        return
    launcher = [sys.executable, "-m", "horovod.runner", "-np", str(args.np)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([*launcher, sys.executable, *sys.argv], env=environment, check=True)


if __name__ == "__main__":
    main()
