"""Trains with Lightning 2, whose own strategies know one process only, on any number of ranks.

The optimizer is wrapped by hand where Lightning asks for it. The trainer runs on one device in each
process; data are sharded here, and metrics averaged.

    horovodrun -np 2 python examples/pytorch_lightning.py
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd


class Digits(lightning.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.right: list[torch.Tensor] = []
        self.accuracy = 0.0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, index: int) -> None:
        images, labels = batch
        self.right.append((self.net(images).argmax(1) == labels).float())

    def on_validation_epoch_end(self) -> None:
        mine = torch.cat(self.right).mean()
        self.right.clear()
        self.accuracy = hvd.allreduce(mine, name="accuracy").item()
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return hvd.DistributedOptimizer(optimizer, named_parameters=self.named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process")
    parser.add_argument("--lr", type=float, default=0.003)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32) / 16.0, torch.tensor(digits.target)
    )
    train, test = torch.utils.data.random_split(
        data, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
    )

    def loader(part: Any) -> DataLoader:
        sampler = DistributedSampler(part, num_replicas=hvd.size(), rank=hvd.rank())
        return DataLoader(part, batch_size=args.batch_size, sampler=sampler)

    module = Digits(args.lr)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        strategy=SingleDeviceStrategy(device="cpu"),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(train), loader(test))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    print(
        f"rank {hvd.rank()} of {hvd.size()}: accuracy {module.accuracy:.4f}, "
        f"sum of weights {weights.sum().item():.6f}",
        flush=True,
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
