"""Trains a residual net the way of large jobs: warm-up, accumulation, checkpoints and resuming.

The images are made up: each class is a pattern under noise. Started again with the same directory,
the script goes on after the last epoch that it saved.

    horovodrun -np 2 python examples/pytorch_imagenet_style.py --checkpoints /tmp/resnet
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

CLASSES = 4


class Block(nn.Module):
    """Two convolutions around a shortcut (He et al., arXiv:1512.03385)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


def small_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        Block(16),
        nn.MaxPool2d(2),
        Block(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def images(count: int, seed: int) -> TensorDataset:
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 3, 16, 16, generator=generator)
    return TensorDataset(patterns[labels] + noise, labels)


class Metric:
    """The mean of a value over the batches and ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = torch.tensor(0.0)
        self.count = 0

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.count += 1

    @property
    def mean(self) -> float:
        return (self.sum / self.count).item()


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == labels).float().mean()


def set_rate(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace, epoch: float, scale: int
) -> None:
    """From the rate of one process up to `scale` times that, then a tenth of it near the end.

    Warm-up after Goyal et al., arXiv:1706.02677.
    """
    if epoch < args.warmup_epochs:
        factor = 1 + (scale - 1) * epoch / args.warmup_epochs
    else:
        factor = scale * (0.1 if epoch >= 0.8 * args.epochs else 1.0)
    for group in optimizer.param_groups:
        group["lr"] = args.lr * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="images per pass and process")
    parser.add_argument("--batches-per-allreduce", type=int, default=2, help="passes per step")
    parser.add_argument("--lr", type=float, default=0.02, help="for one process and pass")
    parser.add_argument("--warmup-epochs", type=float, default=1.0)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--checkpoints", type=Path, help="directory to save to and resume from")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    directory = args.checkpoints or Path(tempfile.mkdtemp(prefix="resnet"))
    directory.mkdir(parents=True, exist_ok=True)

    # Rank 0 alone looks for checkpoints: the others may not see its disk.
    saved = [int(path.stem) for path in directory.glob("*.pt")] if hvd.rank() == 0 else []
    newest = torch.tensor(max(saved, default=0))
    resume = int(hvd.broadcast(newest, root_rank=0, name="resume_from_epoch").item())

    data, unseen = images(args.images, seed=1), images(args.images // 4, seed=2)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    test_sampler = DistributedSampler(unseen, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(unseen, batch_size=args.batch_size, sampler=test_sampler)

    net = small_resnet()
    scale = args.batches_per_allreduce * hvd.size()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-5),
        named_parameters=net.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
    )
    if resume and hvd.rank() == 0:
        checkpoint = torch.load(directory / f"{resume}.pt")
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    passes = args.batches_per_allreduce
    for epoch in range(resume, args.epochs):
        net.train()
        sampler.set_epoch(epoch)
        loss_metric = Metric("train_loss")
        for i, (batch, labels) in enumerate(loader):
            if i % passes == 0:
                set_rate(optimizer, args, epoch + i / len(loader), scale)
                optimizer.zero_grad()
            loss = F.cross_entropy(net(batch), labels)
            loss_metric.update(loss)
            (loss / passes).backward()  # gradients of the passes add up: this makes it their mean
            if i % passes == passes - 1 or i == len(loader) - 1:
                optimizer.step()
        net.eval()
        right = Metric("val_accuracy")
        with torch.no_grad():
            for batch, labels in test_loader:
                right.update(accuracy(net(batch), labels))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss_metric.mean:.4f}, accuracy {right.mean:.2%}")
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, directory / f"{epoch + 1}.pt")
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    print(
        f"rank {hvd.rank()} of {hvd.size()}: resumed from epoch {resume}, "
        f"sum of weights {weights.sum().item():.6f}",
        flush=True,
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
