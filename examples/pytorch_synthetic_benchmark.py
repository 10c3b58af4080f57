"""Measures how many images a second a residual net trains on, per process and in all.

The images are random; only speed is looked at.

    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py --model resnet18 --batch-size 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3, 1x1, around a shortcut (He et al., arXiv:1512.03385)."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        sizes = [(1, 1), (3, stride), (1, 1)] if bottleneck else [(3, stride), (3, 1)]
        channels = [inputs, *[width] * (len(sizes) - 1), outputs]
        layers: list[nn.Module] = []
        for (size, step), source, target in zip(sizes, channels[:-1], channels[1:], strict=True):
            layers += [
                nn.Conv2d(source, target, size, step, size // 2, bias=False),
                nn.BatchNorm2d(target),
                nn.ReLU(inplace=True),
            ]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def residual_net(depths: Sequence[int], bottleneck: bool, classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for i in range(depth):
            layers.append(Block(channels, width, 2 if stage and not i else 1, bottleneck))
            channels = 4 * width if bottleneck else width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


MODELS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch-size", type=int, default=8, help="images per step and process")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of an edge")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--num-warmup-batches", type=int, default=2)
    parser.add_argument("--num-batches-per-iter", type=int, default=2)
    parser.add_argument("--num-iters", type=int, default=5, help="measurements, at least 2")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    torch.manual_seed(hvd.rank())

    net = residual_net(*MODELS[args.model])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01 * hvd.size()),
        named_parameters=net.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(1000, (args.batch_size,))

    def train(batches: int) -> None:
        for _ in range(batches):
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()

    def say(text: str) -> None:
        if hvd.rank() == 0:
            print(text)

    megabytes = sum(p.numel() * p.element_size() for p in net.parameters()) / 1e6
    say(
        f"{args.model}, {megabytes:.1f} MB of gradients, batch {args.batch_size} on each of "
        f"{hvd.size()} processes, {torch.get_num_threads()} threads each"
    )
    train(args.num_warmup_batches)
    rates = []
    for i in range(args.num_iters):
        started = time.perf_counter()
        train(args.num_batches_per_iter)
        seconds = time.perf_counter() - started
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        say(f"iteration {i + 1}: {rates[-1]:.2f} images/s on rank 0")

    # 95 % of a normal distribution lie within 1.96 standard deviations.
    means = hvd.allgather_object((statistics.mean(rates), 1.96 * statistics.stdev(rates)))
    for rank, (mean, spread) in enumerate(means):
        say(f"rank {rank}: {mean:.2f} +- {spread:.2f} images/s")
    total = sum(mean for mean, _ in means)
    spread = sum(spread for _, spread in means)  # ranks step together, so their errors add up
    say(f"total on {hvd.size()} processes: {total:.2f} +- {spread:.2f} images/s")
    hvd.shutdown()


if __name__ == "__main__":
    main()
