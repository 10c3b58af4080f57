"""One class for each library that is measured, in the ranks; knows no clock, turn or table.

An adapter reduces lists of tensors in several ways. A way is a method that takes the tensors and
returns a call, which sums them over the ranks, in place, once. `ways` names those for each kind of
point. A rank needs its own library only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

MIB = 1 << 20

Call = Callable[[], object]


class Adapter(Protocol):
    """Loads what tensors are made with; `directory` is the job's own, for ranks to meet in."""

    rank: int  # since `join`
    size: int
    ways: ClassVar[dict[str, tuple[str, ...]]]
    versions: dict[str, str]

    def __init__(self, directory: Path) -> None: ...
    def join(self) -> None:
        """Loads the library and meets the other ranks."""
        ...

    def tensors(self, counts: Sequence[int], value: float) -> list[Any]: ...
    def expected(self) -> float:
        """What each element is after a call, if rank r filled its tensors with r + 1."""
        ...

    def barrier(self) -> None: ...
    def warm_up(self, call: Call) -> None:
        """Before a turn: others had the caches."""
        ...

    def close(self) -> None: ...


def packed(tensors: Sequence[Any], limits_bytes: Sequence[int], size_bytes: Callable[[Any], int]):
    """Lists of tensors, the last first; each is full when it has reached its limit.

    The last limit holds for all that follow.
    """
    lists: list[list[Any]] = [[]]
    filled_bytes = 0
    for tensor in reversed(tensors):
        limit_bytes = limits_bytes[min(len(lists), len(limits_bytes)) - 1]
        if filled_bytes >= limit_bytes:
            lists.append([])
            filled_bytes = 0
        lists[-1].append(tensor)
        filled_bytes += size_bytes(tensor)
    return lists


class Torch:
    """What adapters of torch share."""

    def __init__(self, directory: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch: Any = torch
        self.directory = directory
        self.versions = {"torch": torch.__version__}

    def tensors(self, counts: Sequence[int], value: float) -> list[Any]:
        return [self.torch.full((count,), value) for count in counts]

    def warm_up(self, call: Call) -> None:
        call()

    def expected(self) -> float:
        return self.size * (self.size + 1) / 2


class Horovod(Torch):
    ways: ClassVar = {"tensor": ("blocking",), "set": ("each", "grouped"), "training": ("train",)}
    op = "Sum"

    def join(self) -> None:
        import horovod
        import horovod.torch as hvd

        self.hvd: Any = hvd
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.reduction = getattr(hvd, self.op)
        self.versions["horovod"] = horovod.__version__

    def barrier(self) -> None:
        self.hvd.barrier()

    def blocking(self, tensors: Sequence[Any]) -> Call:
        (tensor,) = tensors
        return lambda: self.hvd.allreduce_(tensor, name="one", op=self.reduction)

    def each(self, tensors: Sequence[Any]) -> Call:
        """As DistributedOptimizer does it; the engine fuses."""
        named = [(f"gradient.{i}", tensor) for i, tensor in enumerate(tensors)][::-1]

        def call() -> None:
            handles = [
                self.hvd.allreduce_async_(tensor, name=name, op=self.reduction)
                for name, tensor in named
            ]
            for handle in handles:
                self.hvd.synchronize(handle)

        return call

    def grouped(self, tensors: Sequence[Any]) -> Call:
        backward = list(tensors)[::-1]
        return lambda: self.hvd.grouped_allreduce_(backward, name="all", op=self.reduction)

    def train(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        named = list(model.named_parameters())
        return model, self.hvd.DistributedOptimizer(optimizer, named_parameters=named)

    def close(self) -> None:
        self.hvd.shutdown()


class HorovodAdasum(Horovod):
    ways: ClassVar = {"tensor": ("blocking",), "set": ("each", "grouped")}
    op = "Adasum"

    def expected(self) -> float:
        return (self.size + 1) / 2  # of parallel tensors, the mean


class TorchGloo(Torch):
    ways: ClassVar = {"tensor": ("blocking",), "set": ("each", "buckets"), "training": ("train",)}

    def join(self) -> None:
        import torch.distributed as dist

        self.dist: Any = dist
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Ranks meet in a file: a port could be taken by somebody else in between.
        store = dist.FileStore(str(self.directory / "store"), self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def barrier(self) -> None:
        self.dist.barrier()

    def blocking(self, tensors: Sequence[Any]) -> Call:
        (tensor,) = tensors
        return lambda: self.dist.all_reduce(tensor)

    def each(self, tensors: Sequence[Any]) -> Call:
        backward = list(tensors)[::-1]

        def call() -> None:
            works = [self.dist.all_reduce(tensor, async_op=True) for tensor in backward]
            for work in works:
                work.wait()

        return call

    def buckets(self, tensors: Sequence[Any]) -> Call:
        """DistributedDataParallel's scheme."""
        pairs = []
        for bucket in packed(tensors, (MIB, 25 * MIB), lambda tensor: tensor.nbytes):
            counts = [tensor.numel() for tensor in bucket]
            flat = self.torch.zeros(sum(counts))
            pairs.append((flat, list(zip(flat.split(counts), bucket, strict=True))))

        def call() -> None:
            works = []
            for flat, pieces in pairs:
                for piece, tensor in pieces:
                    piece.copy_(tensor)
                works.append(self.dist.all_reduce(flat, async_op=True))
            for work, (_, pieces) in zip(works, pairs, strict=True):
                work.wait()
                for piece, tensor in pieces:
                    tensor.copy_(piece)

        return call

    def train(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return self.torch.nn.parallel.DistributedDataParallel(model), optimizer

    def close(self) -> None:
        self.dist.destroy_process_group()


class Independent(Torch):
    """Processes that share nothing but the machine."""

    ways: ClassVar = {"training": ("train",)}

    def join(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def train(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return model, optimizer

    def close(self) -> None:
        """There is nothing to leave."""


class Limit(Torch):
    """The yard-stick of `horovod bench`: a bare allreduce, in native code, of adjacent tensors."""

    ways: ClassVar = {"tensor": ("fastest",), "set": ("fastest",)}

    def join(self) -> None:
        import horovod
        from horovod.bench import limit
        from horovod.common import basics, config

        self.basics: Any = basics
        basics.init()
        self.rank, self.size = basics.rank(), basics.size()
        self.yard_stick = limit.Limit(config.from_environ())
        self.versions["horovod"] = horovod.__version__

    def tensors(self, counts: Sequence[int], value: float) -> list[Any]:
        return list(self.torch.full((sum(counts),), value).split(list(counts)))

    def barrier(self) -> None:
        self.yard_stick.barrier()

    def fastest(self, tensors: Sequence[Any]) -> Call:
        return Bare(self.yard_stick, tensors)

    def warm_up(self, call: Call) -> None:
        assert isinstance(call, Bare)
        call.choose()
        call()

    def close(self) -> None:
        self.basics.shutdown()


class Bare:
    """A call of the yard-stick, on tensors that lie one behind the other."""

    def __init__(self, yard_stick: Any, tensors: Sequence[Any]) -> None:
        self._yard_stick = yard_stick
        self._address = tensors[0].data_ptr()
        self._count = sum(tensor.numel() for tensor in tensors)
        self._kinds = yard_stick.kinds(self._count)
        self._kind = self._kinds[0]

    def __call__(self) -> object:
        return self._run(self._kind)

    def _run(self, kind: Any) -> Any:
        return self._yard_stick.allreduce(self._address, self._count, kind)

    def choose(self) -> None:
        """Takes the kind that is the fastest on rank 0 now; a machine may change at any moment."""
        from horovod.bench.limit import fastest
        from horovod.common.objects import broadcast_object
        from horovod.common.process_sets import global_process_set

        rounds = max(2, min(20, 16 * MIB // (4 * self._count)))
        kind = fastest(self._kinds, rounds, self._run)
        self._kind = broadcast_object(kind, 0, None, global_process_set)


class Numpy:
    """What adapters of libraries without tensors of their own share."""

    def __init__(self, directory: Path) -> None:
        import numpy as np

        self.np: Any = np
        self.directory = directory
        self.versions = {"numpy": np.__version__}

    def tensors(self, counts: Sequence[int], value: float) -> list[Any]:
        return [self.np.full(count, value, self.np.float32) for count in counts]

    def warm_up(self, call: Call) -> None:
        call()

    def expected(self) -> float:
        return self.size * (self.size + 1) / 2


class Mpi(Numpy):
    ways: ClassVar = {"tensor": ("blocking",), "set": ("each", "fused")}

    def join(self) -> None:
        import mpi4py

        mpi4py.rc.threads = False  # no locks: one thread calls
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.versions["mpi4py"] = mpi4py.__version__
        first, *_ = MPI.Get_library_version().partition(",")[0].splitlines()
        self.versions["MPI"] = " ".join(first.split())

    def barrier(self) -> None:
        self.world.Barrier()

    def blocking(self, tensors: Sequence[Any]) -> Call:
        (tensor,) = tensors
        return lambda: self.world.Allreduce(self.mpi.IN_PLACE, tensor)

    def each(self, tensors: Sequence[Any]) -> Call:
        backward = list(tensors)[::-1]

        def call() -> None:
            requests = [self.world.Iallreduce(self.mpi.IN_PLACE, tensor) for tensor in backward]
            self.mpi.Request.Waitall(requests)

        return call

    def fused(self, tensors: Sequence[Any]) -> Call:
        """Copied into one buffer, reduced, copied back; what is large goes alone."""
        lists = packed(tensors, (64 * MIB,), lambda tensor: tensor.nbytes)
        largest = max(sum(tensor.size for tensor in tensors) for tensors in lists)
        (buffer,) = self.tensors([largest], 0)
        plan = []
        for each in lists:
            pieces, begin = [], 0
            for tensor in each:
                pieces.append((buffer[begin : begin + tensor.size], tensor))
                begin += tensor.size
            plan.append((each[0] if len(each) == 1 else buffer[:begin], pieces))

        def call() -> None:
            for whole, pieces in plan:
                if len(pieces) > 1:
                    for piece, tensor in pieces:
                        piece[:] = tensor
                self.world.Allreduce(self.mpi.IN_PLACE, whole)
                if len(pieces) > 1:
                    for piece, tensor in pieces:
                        tensor[:] = piece

        return call

    def close(self) -> None:
        self.mpi.Finalize()


class OneCcl(Numpy):
    """Through the few C functions of oneccl.cc, since the library's own interface is C++."""

    ways: ClassVar = {"tensor": ("blocking",), "set": ("each",)}

    def join(self) -> None:
        self.library = ctypes.CDLL(os.environ["BENCHMARK_ONECCL"])
        self.library.oneccl_submit.restype = ctypes.c_void_p
        self.library.oneccl_submit.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.library.oneccl_wait.argtypes = [ctypes.c_void_p]
        self.library.oneccl_version.restype = ctypes.c_char_p
        self.rank, self.size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
        self.call(self.library.oneccl_init, self.rank, self.size, bytes(self.directory / "address"))
        self.versions["oneCCL"] = self.library.oneccl_version().decode()

    @staticmethod
    def call(function: Any, *arguments: Any) -> None:
        if function(*arguments) != 0:
            raise RuntimeError(f"{function.__name__} failed; oneCCL has printed why")

    def submit(self, tensor: Any) -> int:
        event = self.library.oneccl_submit(tensor.ctypes.data, tensor.size)
        if event is None:
            raise RuntimeError("oneccl_submit failed; oneCCL has printed why")
        return event

    def barrier(self) -> None:
        self.call(self.library.oneccl_barrier)

    def blocking(self, tensors: Sequence[Any]) -> Call:
        (tensor,) = tensors
        return lambda: self.call(self.library.oneccl_wait, self.submit(tensor))

    def each(self, tensors: Sequence[Any]) -> Call:
        backward = list(tensors)[::-1]

        def call() -> None:
            events = [self.submit(tensor) for tensor in backward]
            for event in events:
                self.call(self.library.oneccl_wait, event)

        return call

    def close(self) -> None:
        self.call(self.library.oneccl_close)
