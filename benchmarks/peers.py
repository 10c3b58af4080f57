"""One adapter for each library that is measured; knows nothing of clocks, suites or tables.

Every rank of one job holds all peers at once, so that they can take turns within one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

MIB = 1 << 20


class Peer(Protocol):
    """A library that sums float32 tensors over the ranks, in place, or `averages` parallel ones.

    `reduce` is one blocking allreduce. `prepare` sees the gradients of a model in the order of its
    parameters, once; `reduce_all` then sums them as a training loop would have it done, the last
    layer first, and returns when all are there.
    """

    averages: bool

    def __init__(self, rank: int, size: int, directory: Path) -> None: ...
    def barrier(self) -> None: ...
    def reduce(self, tensor: torch.Tensor) -> None: ...
    def prepare(self, gradients: Sequence[torch.Tensor]) -> None: ...
    def reduce_all(self) -> None: ...
    def close(self) -> None: ...


class Horovod:
    """Each gradient submitted by itself, as DistributedOptimizer does it; the engine fuses."""

    averages = False
    op = "Sum"

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        import horovod.torch as hvd

        self.hvd: Any = hvd
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rank, size)

    def barrier(self) -> None:
        self.hvd.barrier()

    def reduce(self, tensor: torch.Tensor) -> None:
        self.hvd.allreduce_(tensor, name="one", op=getattr(self.hvd, self.op))

    def prepare(self, gradients: Sequence[torch.Tensor]) -> None:
        self.gradients = list(enumerate(gradients))[::-1]

    def reduce_all(self) -> None:
        handles = [
            self.hvd.allreduce_async_(gradient, name=f"gradient.{i}", op=getattr(self.hvd, self.op))
            for i, gradient in self.gradients
        ]
        for handle in handles:
            self.hvd.synchronize(handle)

    def close(self) -> None:
        self.hvd.shutdown()


class HorovodGrouped(Horovod):
    """All gradients of a step in one grouped call."""

    def reduce_all(self) -> None:
        tensors = [gradient for _, gradient in self.gradients]
        self.hvd.grouped_allreduce_(tensors, name="all", op=getattr(self.hvd, self.op))


class HorovodAdasum(Horovod):
    averages = True
    op = "Adasum"


class TorchGloo:
    """torch.distributed with its gloo backend; each gradient by itself."""

    averages = False

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        import torch.distributed as dist

        self.dist: Any = dist
        # Ranks meet in a file: a port could be taken by somebody else in between.
        store = dist.FileStore(str(directory / f"{type(self).__name__}.store"), size)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def barrier(self) -> None:
        self.dist.barrier()

    def reduce(self, tensor: torch.Tensor) -> None:
        self.dist.all_reduce(tensor)

    def prepare(self, gradients: Sequence[torch.Tensor]) -> None:
        self.gradients = list(gradients)[::-1]

    def reduce_all(self) -> None:
        works = [self.dist.all_reduce(gradient, async_op=True) for gradient in self.gradients]
        for work in works:
            work.wait()

    def close(self) -> None:
        if self.dist.is_initialized():
            self.dist.destroy_process_group()


class TorchGlooBuckets(TorchGloo):
    """As DistributedDataParallel does it: copied into buckets of 1 MiB, then 25 MiB, and back."""

    def prepare(self, gradients: Sequence[torch.Tensor]) -> None:
        buckets: list[list[torch.Tensor]] = [[]]
        limit_bytes, filled_bytes = MIB, 0
        for gradient in reversed(gradients):
            if filled_bytes >= limit_bytes:
                buckets.append([])
                limit_bytes, filled_bytes = 25 * MIB, 0
            buckets[-1].append(gradient)
            filled_bytes += gradient.numel() * gradient.element_size()
        self.buckets = []
        for bucket in buckets:
            counts = [gradient.numel() for gradient in bucket]
            flat = torch.zeros(sum(counts))
            self.buckets.append((flat, list(zip(flat.split(counts), bucket, strict=True))))

    def reduce_all(self) -> None:
        works = []
        for flat, pairs in self.buckets:
            for piece, gradient in pairs:
                piece.copy_(gradient)
            works.append(self.dist.all_reduce(flat, async_op=True))
        for work, (_, pairs) in zip(works, self.buckets, strict=True):
            work.wait()
            for piece, gradient in pairs:
                gradient.copy_(piece)


PEERS: dict[str, type[Peer]] = {
    "horovod": Horovod,
    "horovod-grouped": HorovodGrouped,
    "horovod-adasum": HorovodAdasum,
    "torch-gloo": TorchGloo,
    "torch-gloo-buckets": TorchGlooBuckets,
}


def resnet50() -> list[int]:
    """Elements of each parameter of ResNet-50."""
    counts, channels = [64 * 3 * 7 * 7, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            counts += [width * channels, width, width, width * width * 9, width, width]
            counts += [width * width * 4, width * 4, width * 4]
            if block == 0:
                counts += [width * 4 * channels, width * 4, width * 4]
            channels = width * 4
    counts += [1000 * 2048, 1000]
    assert (len(counts), sum(counts)) == (161, 25_557_032)
    return counts


def bert_base() -> list[int]:
    """Elements of each parameter of BERT-base (uncased)."""
    hidden, inner = 768, 3072
    counts = [30522 * hidden, 512 * hidden, 2 * hidden, hidden, hidden]
    for _ in range(12):
        counts += [hidden * hidden, hidden] * 4 + [hidden, hidden]
        counts += [inner * hidden, inner, hidden * inner, hidden, hidden, hidden]
    counts += [hidden * hidden, hidden]
    assert (len(counts), sum(counts)) == (199, 109_482_240)
    return counts


MODELS = {"resnet50": resnet50, "bert-base": bert_base}
