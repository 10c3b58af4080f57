"""Tensors of an accelerator: copies keep the order of streams, and memory outlives them."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError
from horovod.torch import device

_spec = importlib.util.spec_from_file_location("late", Path(__file__).with_name("late.py"))
assert _spec is not None and _spec.loader is not None
late = sys.modules["late"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(late)


@contextmanager
def a_late_device() -> Iterator[None]:
    device._STAGING["privateuseone"] = device.Accelerator(late.RUNTIME, late.memory)
    try:
        yield
    finally:
        del device._STAGING["privateuseone"]


def layouts() -> list[torch.Tensor]:
    values = torch.arange(24.0).reshape(4, 3, 2)
    image = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    return [
        values,
        values.transpose(0, 2),
        values.bfloat16(),
        values.long(),
        torch.tensor(3.0),
        torch.empty(0, 2),
        image.contiguous(memory_format=torch.channels_last),
        torch.complex(values, values + 1).conj(),
    ]


@pytest.mark.np(1, 2)
def test_no_copy_overtakes_what_was_queued_before() -> None:
    n = hvd.size()
    with a_late_device():
        for plain in layouts():
            mine = late.on_device(plain)  # queued, not done
            mine.mul_(2)
            handle = hvd.allreduce_async(mine, op=hvd.Sum)
            mine.fill_(7)  # after the call: no part of it
            total = hvd.synchronize(handle)
            assert torch.equal(late.read(total), 2 * n * plain)
            total.mul_(0)
            assert total.device == late.DEVICE and total.is_contiguous()
            assert torch.equal(late.read(mine), torch.full_like(plain, 7))


@pytest.mark.np(2)
def test_an_optimizer_sends_gradients_once_they_are_on_the_host() -> None:
    with a_late_device():
        weight = late.on_device(torch.zeros(6)).requires_grad_()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.grad = late.on_device(torch.full((6,), hvd.rank() + 1.0))  # queued, not done
        optimizer.synchronize()
        assert torch.equal(late.read(weight.grad), torch.full((6,), 1.5))


@pytest.mark.np(1, 2)
def test_in_place_the_result_is_there_for_what_is_queued_afterwards() -> None:
    n = hvd.size()
    with a_late_device():
        for plain in layouts():
            mine = late.on_device(plain)
            assert hvd.allreduce_(mine, op=hvd.Sum) is mine
            mine.mul_(3)
            assert torch.equal(late.read(mine), 3 * n * plain)
            assert hvd.broadcast_(mine, n - 1) is mine
            assert mine.stride() == plain.stride()
            assert torch.equal(late.read(mine), 3 * n * plain)


@pytest.mark.np(2)
def test_every_collective_gives_tensors_of_the_device() -> None:
    rank = hvd.rank()
    plain = torch.arange(4.0)
    with a_late_device():
        mine = late.on_device(plain + rank)
        wanted = {
            "allgather": torch.cat([plain, plain + 1]),
            "broadcast": plain + 1,
            "alltoall": torch.cat([plain[2 * rank :][:2], plain[2 * rank :][:2] + 1]),
            "reducescatter": 2 * plain[2 * rank :][:2] + 1,
        }
        results = {
            "allgather": hvd.allgather(mine),
            "broadcast": hvd.broadcast(mine, 1),
            "alltoall": hvd.alltoall(mine),
            "reducescatter": hvd.reducescatter(mine, op=hvd.Sum),
        }
        for name, result in results.items():
            assert result.device == late.DEVICE
            assert torch.equal(late.read(result), wanted[name]), name
        rows, received = hvd.alltoall(mine, [1, 3])
        assert received.tolist() == [1 + 2 * rank] * 2 and received.device.type == "cpu"
        assert rows.device == late.DEVICE


@pytest.mark.np(2)
def test_a_group_starts_all_copies_before_it_waits() -> None:
    plain = torch.arange(3.0)
    with a_late_device():
        tensors = [late.on_device(plain + i) for i in range(4)]
        waits = []
        original = late.Event.synchronize
        side = device._STAGING["privateuseone"]._side_stream(late.DEVICE)

        def waiting(event: object) -> None:
            waits.append(len(side.queue))
            original(event)

        late.Event.synchronize = waiting
        try:
            results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        finally:
            late.Event.synchronize = original
        assert len(waits) == 4 and waits[0] == 3 * 4  # each waits, copies, and leaves its mark
        for i, result in enumerate(results):
            assert torch.equal(late.read(result), 2 * (plain + i))


@pytest.mark.np(1)
def test_results_follow_the_stream_that_is_current_when_they_are_taken() -> None:
    with a_late_device():
        with late.RUNTIME.stream(late.Stream()):
            mine = late.on_device(torch.ones(3))
            handle = hvd.allreduce_async_(mine, op=hvd.Sum)
        with late.RUNTIME.stream(late.Stream()):
            hvd.synchronize(handle)
            mine.mul_(5)
            assert torch.equal(late.read(mine), torch.full((3,), 5.0))


@pytest.mark.np(1)
def test_memory_lives_until_the_copies_are_done_and_no_longer() -> None:
    with a_late_device():
        result = hvd.allreduce(late.on_device(torch.ones(3)), op=hvd.Sum)
        gathered = hvd.allgather(late.on_device(torch.ones(3, 2)))
        gc.collect()
        # the queued copies would fail if the host memory that they read were gone
        assert torch.equal(late.read(result), torch.ones(3))
        assert torch.equal(late.read(gathered), torch.ones(3, 2))
        del result, gathered
        later = hvd.allreduce(late.on_device(torch.ones(1)), op=hvd.Sum)
        late.read(later)
        gc.collect()
        accelerator = device._STAGING["privateuseone"]
        assert len(accelerator._copying) <= 2  # those of the last call


@pytest.mark.np(1)
def test_the_late_device_notices_what_it_is_for() -> None:
    with a_late_device():
        host = late.memory((3,), dtype=torch.float32)
        host.copy_(late.on_device(torch.ones(3)), non_blocking=True)
        assert not torch.equal(host, torch.ones(3))  # read too early
        late.RUNTIME.current.run()
        assert torch.equal(host, torch.ones(3))
        late.on_device(torch.ones(3)).copy_(host, non_blocking=True)
        del host
        with pytest.raises(AssertionError, match="given back"):
            late.RUNTIME.current.run()


@pytest.mark.np(2)
def test_a_group_on_several_devices_fails_on_every_rank() -> None:
    with a_late_device():
        first = late.on_device(torch.ones(2))
        second = torch.ones(2) if hvd.rank() else late.on_device(torch.ones(2))
        kind = hvd.HorovodInternalError if hvd.rank() else MismatchError
        with pytest.raises(kind, match=r"one device"):
            hvd.grouped_allreduce([first, second], name="mixed")
        # ranks may differ, if each keeps to one
        pair = [late.on_device(torch.ones(2)) if hvd.rank() else torch.ones(2) for _ in range(2)]
        for result in hvd.grouped_allreduce(pair, name="mixed", op=hvd.Sum):
            read = late.read(result) if hvd.rank() else result
            assert torch.equal(read, torch.full((2,), 2.0))


@pytest.mark.np(2)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors() -> None:
    n, rank = hvd.size(), hvd.rank()
    cuda = torch.device("cuda", rank % torch.cuda.device_count())
    for plain in layouts():
        mine = plain.to(cuda)
        big = torch.randn(2048, 2048, device=cuda)
        for _ in range(20):
            big = big @ big / 64  # keeps the stream busy
        mine.mul_(2)
        handle = hvd.allreduce_async(mine, op=hvd.Sum)
        mine.fill_(7)
        total = hvd.synchronize(handle)
        assert total.device == cuda and torch.equal(total.cpu(), 2 * n * plain)
        hvd.allreduce_(mine, op=hvd.Sum)
        mine.mul_(3)
        assert torch.equal(mine.cpu(), torch.full_like(plain, 21 * n))
    gathered = hvd.allgather(torch.full((2,), float(rank), device=cuda))
    assert gathered.device == cuda and gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
    splits = torch.tensor([1, 1], dtype=torch.int32, device=cuda)
    rows, received = hvd.alltoall(torch.arange(2.0, device=cuda), splits)
    assert rows.device == received.device == cuda and rows.tolist() == [float(rank)] * 2
    sparse = torch.eye(3, device=cuda)[rank].to_sparse()
    assert hvd.sparse_allreduce(sparse, op=hvd.Sum).to_dense().tolist() == [1.0, 1.0, 0.0]
    groups = [torch.ones(5, device=cuda), torch.ones(2, 2, device=cuda, dtype=torch.float16)]
    for total in hvd.grouped_allreduce(groups, op=hvd.Sum):
        assert total.device == cuda and torch.all(total == n)


def test_the_queries_about_gpus() -> None:
    assert hvd._check_has_gpu() is torch.cuda.is_available()
    assert hvd.nccl_built() == 0 and type(hvd.nccl_built()) is int
    assert hvd.cuda_built() is False
