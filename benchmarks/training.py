"""Models that are trained on made-up data, one thread a rank; knows no library but torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Six convolutions with batch normalisation on 3 x 32 x 32, 1.2 million parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for i, width in enumerate((32, 32, 64, 64, 128, 256)):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU(inplace=True))
        if i % 2:
            layers.append(nn.MaxPool2d(2))
        channels = width
    layers += [nn.Flatten(), nn.Linear(256 * 16, 192), nn.ReLU(), nn.Linear(192, 10)]
    return nn.Sequential(*layers)


# How it is built, the shape of a sample, classes, samples in a batch, steps in an iteration.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {
    "mlp": (lambda: mlp(784, 512, 512, 256, 10), (784,), 10, 64, 25),
    "wide": (lambda: mlp(1024, 2048, 2048, 2048, 1000), (1024,), 1000, 64, 3),
    "cnn": (cnn, (3, 32, 32), 10, 32, 3),
}


def window(
    name: str, rank: int, distributed: Callable[[Any, Any], tuple[Any, Any]]
) -> tuple[Callable[[], None], int]:
    """A call that trains for a few steps, and how many samples of this rank those take.

    `distributed` makes the model and its optimizer part of a job.
    """
    build, shape, classes, batch, steps = MODELS[name]
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = distributed(model, optimizer)
    torch.manual_seed(100 + rank)
    data = [(torch.randn(batch, *shape), torch.randint(0, classes, (batch,))) for _ in range(4)]

    def call() -> None:
        for step in range(steps):
            samples, labels = data[step % len(data)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(samples), labels).backward()
            optimizer.step()

    return call, batch * steps
