"""Trains a small convolutional net on scikit-learn's handwritten digits, on any number of ranks.

horovodrun -np 2 python examples/pytorch_digits.py
python examples/pytorch_digits.py            # the same on one process
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd


def datasets(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8x8 pixels, split into 1437 for training and 360 for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


def average(value: float, name: str) -> float:
    """The mean of a number over all ranks."""
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name).item()


def evaluate(net: nn.Module, loader: DataLoader) -> float:
    """Share of right answers over the test images of all ranks."""
    net.eval()
    counts = torch.zeros(2, dtype=torch.int64)  # right, all
    with torch.no_grad():
        for images, labels in loader:
            counts[0] += (net(images).argmax(1) == labels).sum()
            counts[1] += len(labels)
    right, total = hvd.allreduce(counts, name="test.counts", op=hvd.Sum).tolist()
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process")
    parser.add_argument("--lr", type=float, default=0.05, help="for one process")
    parser.add_argument("--warmup-epochs", type=float, default=2.0)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)  # the net is small: more threads would only wait for each other
    torch.manual_seed(args.seed)
    started = time.perf_counter()

    train, test = datasets(args.seed)
    # Every rank sees its own part of the data, anew in each epoch.
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    mine = range(hvd.rank(), len(test), hvd.size())
    test_loader = DataLoader(torch.utils.data.Subset(test, mine), batch_size=360)

    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # size() times the batch bears size() times the rate, reached from the rate of one process over
    # the first epochs (Goyal et al., 2017, arXiv:1706.02677), and lowered to 0 towards the end.
    steps = len(loader)

    def rate(step: int) -> float:
        epoch = step / steps
        if epoch < args.warmup_epochs:
            return 1 + (hvd.size() - 1) * epoch / args.warmup_epochs
        return hvd.size() * (args.epochs - epoch) / max(args.epochs - args.warmup_epochs, 1e-9)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    if hvd.rank() == 0:
        print(
            f"{hvd.size()} process{'es' if hvd.size() > 1 else ''}, {len(train)} training images, "
            f"{len(test)} for the test, {steps} steps of {args.batch_size * hvd.size()} an epoch"
        )
    for epoch in range(args.epochs):
        net.train()
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        mean_loss = average(total / steps, "train.loss")
        accuracy = evaluate(net, test_loader)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}/{args.epochs}  loss {mean_loss:.4f}  "
                f"test accuracy {accuracy:.2%}  {time.perf_counter() - started:.1f} s"
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
