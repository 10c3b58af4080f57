"""Compares what reducing gradients costs through the tape of TensorFlow and through torch.

    horovodrun -np 2 python benchmarks/tensorflow_tape.py

Both front ends share the ranks' engines and take turns in short rounds. The tape's cost is what a
training step in one `tf.function` takes with the tape distributed, less what it takes without;
torch's is that of the same list, submitted tensor by tensor and reduced in place. A step lasts as
long as its slowest rank; a number is the median over all rounds (10 % .. 90 %).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch

import horovod.tensorflow as hvd
import horovod.torch
from horovod.bench.points import MODELS


def training_step(counts: list[int], distributed: bool) -> Callable[[], Any]:
    """A step whose gradients are zeros, so that sums stay finite however many there are."""
    weights = [tf.Variable(tf.zeros([count])) for count in counts]
    inputs = [tf.Variable(tf.zeros([count])) for count in counts]  # constants would be folded

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            products = zip(weights, inputs, strict=True)
            loss = tf.add_n([tf.reduce_sum(weight * x) for weight, x in products])
        if distributed:
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign(gradient)

    return step


def reduce_with_torch(gradients: list[torch.Tensor]) -> None:
    """The last layer first, as a backward pass does it."""
    handles = [
        horovod.torch.allreduce_async_(gradients[i], name=f"gradient.{i}", op=hvd.Sum)
        for i in reversed(range(len(gradients)))
    ]
    for handle in handles:
        horovod.torch.synchronize(handle)


def measure(calls: dict[str, Callable[[], Any]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of each call, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round in range(rounds + 1):  # the first is to warm up
        for name, call in calls.items():
            horovod.torch.barrier()
            for _ in range(steps):
                start = time.perf_counter()
                call()
                if round:
                    times[name].append(time.perf_counter() - start)
    by_rank = hvd.allgather_object(times)
    return {
        name: [max(step) for step in zip(*(one[name] for one in by_rank), strict=True)]
        for name in calls
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="in each round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    counts = MODELS[options.model]()
    gradients = [torch.zeros(count) for count in counts]
    calls = {
        "step": training_step(counts, distributed=False),
        "step with the tape": training_step(counts, distributed=True),
        "torch": lambda: reduce_with_torch(gradients),
    }
    times = measure(calls, options.rounds, options.steps)
    if hvd.rank() == 0:
        print(f"{options.model}: {len(counts)} tensors, {sum(counts) * 4 / 1e6:.0f} MB")
        for name, seconds in times.items():
            low, *_, high = statistics.quantiles(seconds, n=10)
            middle = statistics.median(seconds)
            print(f"{name:20} {middle * 1e3:7.1f} ms ({low * 1e3:.1f} .. {high * 1e3:.1f})")
        pairs = zip(times["step with the tape"], times["step"], strict=True)
        cost = statistics.median(with_tape - without for with_tape, without in pairs)
        print(f"tape / torch         {cost / statistics.median(times['torch']):7.2f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
