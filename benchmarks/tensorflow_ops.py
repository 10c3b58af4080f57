"""Compares what one collective costs in TensorFlow, eager and in graphs, with torch and nothing.

    horovodrun -np 2 python benchmarks/tensorflow_ops.py

All share the ranks' engines and take turns. A chain is 50 calls in one `tf.function`, each of which
needs the one before; side by side are 50 that don't, which is what gradients do. `tf.identity` is
the same graph without communication. Microseconds a call, the median over all rounds.
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

CALLS = 50


def graphs() -> dict[str, Callable[[tf.Tensor], Any]]:
    """By what they do with a tensor."""

    @tf.function(autograph=False)
    def identities(x: tf.Tensor) -> tf.Tensor:
        for _ in range(CALLS):
            x = tf.identity(x)
        return x

    @tf.function(autograph=False)
    def chain(x: tf.Tensor) -> tf.Tensor:
        for _ in range(CALLS):
            x = hvd.allreduce(x)
        return x

    @tf.function(autograph=False)
    def side_by_side(x: tf.Tensor) -> list[tf.Tensor]:
        return [hvd.allreduce(x + float(i)) for i in range(CALLS)]

    @tf.function(autograph=False)
    def sums(x: tf.Tensor) -> list[tf.Tensor]:
        return [x + float(i) for i in range(CALLS)]

    return {
        "tf.identity, chain": identities,
        "graph, chain": chain,
        "graph, only the sums": sums,
        "graph, side by side": side_by_side,
    }


def torch_side_by_side(x: torch.Tensor) -> list[torch.Tensor]:
    handles = [horovod.torch.allreduce_async(x + float(i), name=f"torch.{i}") for i in range(CALLS)]
    return [horovod.torch.synchronize(handle) for handle in handles]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 4096, 4 << 20])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a call in a round, about")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    torch.set_num_threads(1)
    hvd.init()
    for size in arguments.bytes:
        x, y = tf.ones([size // 4]), torch.ones(size // 4)
        calls: dict[str, tuple[int, Callable[[], Any]]] = {
            "torch, eager": (1, lambda y=y: horovod.torch.allreduce(y)),
            "TensorFlow, eager": (1, lambda x=x: hvd.allreduce(x)),
            "torch, side by side": (CALLS, lambda y=y: torch_side_by_side(y)),
        }
        for name, graph in graphs().items():
            calls[name] = (CALLS, lambda x=x, graph=graph: graph(x))
        times: dict[str, list[float]] = {name: [] for name in calls}
        repeats: dict[str, int] = {}
        for round_ in range(arguments.rounds + 1):  # the first is to warm up and to count
            for name, (each, call) in calls.items():
                count = repeats.get(name, 3)
                hvd.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    call()
                seconds = (time.perf_counter() - start) / count
                if round_ == 0:
                    wanted = tf.constant(max(1, int(arguments.seconds / seconds)))
                    repeats[name] = int(hvd.broadcast(wanted, 0))
                else:
                    times[name].append(seconds / each * 1e6)
        if hvd.rank() == 0:
            print(f"{size} B, {hvd.size()} processes")
            for name, values in times.items():
                print(f"  {name:24} {statistics.median(values):9.1f} us")
    hvd.shutdown()


if __name__ == "__main__":
    main()
