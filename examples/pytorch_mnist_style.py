"""The usual MNIST script on scikit-learn's digits: sharded data, averaged metrics, own launch.

horovodrun -np 2 python examples/pytorch_mnist_style.py
python examples/pytorch_mnist_style.py --num-proc 2      # starts its own processes
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod
import horovod.torch as hvd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """The digits, one in five for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def loader_of(data: TensorDataset, args: argparse.Namespace) -> DataLoader:
    """Batches of this rank's part of the data."""
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    return DataLoader(data, batch_size=args.batch_size, sampler=sampler)


def average(value: float, name: str) -> float:
    """The mean of a number over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    net.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return average(total / len(loader), "avg_loss")


def test(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += (net(images).argmax(1) == labels).sum().item()
    return average(right / len(loader.sampler), "avg_accuracy")


def main(args: argparse.Namespace) -> float:
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.cuda and torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())  # one GPU a process
        torch.cuda.set_device(device)

    train_data, test_data = datasets()
    train_loader, test_loader = loader_of(train_data, args), loader_of(test_data, args)
    net = Net().to(device)
    # A batch size() times as large bears size() times the rate. Adasum finds the scale by itself,
    # on GPUs with NCCL within a host excepted.
    scale = 1 if args.use_adasum else hvd.size()
    if args.use_adasum and device.type == "cuda" and hvd.nccl_built():
        scale = hvd.local_size()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr * scale, momentum=args.momentum)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        train_loader.sampler.set_epoch(epoch)
        loss = train(net, optimizer, train_loader)
        accuracy = test(net, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}")
    print(f"rank {hvd.rank()} of {hvd.size()}: final accuracy {accuracy:.4f}", flush=True)
    hvd.shutdown()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process")
    parser.add_argument("--lr", type=float, default=0.02, help="for one process")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--cuda", action="store_true", help="train on GPUs if there are any")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients with Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--num-proc", type=int, help="start that many processes from here")
    parser.add_argument("--hosts", help="where to start them, for example host1:2,host2:2")
    arguments = parser.parse_args()
    if arguments.num_proc:
        results = horovod.run(
            main, args=(arguments,), num_proc=arguments.num_proc, hosts=arguments.hosts
        )
        print(f"accuracies by rank: {results}")
    else:
        main(arguments)
