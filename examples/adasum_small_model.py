"""Trains a small model twice, its gradients reduced by Adasum and by Average, and compares losses.

horovodrun -np 2 python examples/adasum_small_model.py

Adasum adds what the ranks' gradients don't have in common and averages what they do, so the
learning rate needs no scaling by the number of ranks.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd


def build_net() -> nn.Module:
    torch.manual_seed(7)  # the same start on every rank, for both ways
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def make_data(rank: int, size: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of samples of a smooth function."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples * size, 16, generator=generator)
    direction = torch.randn(16, 1, generator=generator)
    targets = torch.sin(inputs @ direction / 4)
    return inputs[rank::size], targets[rank::size]


def train(op: int, options: argparse.Namespace) -> float:
    """The loss over all ranks' samples after training."""
    net = build_net()
    inputs, targets = make_data(hvd.rank(), hvd.size(), options.samples)
    optimizer = torch.optim.SGD(net.parameters(), lr=options.lr)
    for _ in range(options.steps):
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        for parameter in net.parameters():
            parameter.grad = hvd.allreduce(parameter.grad, op=op)
        optimizer.step()
    with torch.no_grad():
        return hvd.allreduce(F.mse_loss(net(inputs), targets)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64, help="on each rank")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    hvd.init()
    for name, op in [("Adasum", hvd.Adasum), ("Average", hvd.Average)]:
        loss = train(op, options)
        if hvd.rank() == 0:
            print(f"{name}: loss {loss:.5f} after {options.steps} steps", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
