"""Joins: ranks that are out of data let the others' collectives go on, or fail, as configured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError

STEPS = [5, 3, 7]


def same(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == wanted.dtype
    assert torch.equal(actual, wanted), (actual, wanted)


def term(rank: int, dtype: torch.dtype = torch.float32, count: int = 6) -> torch.Tensor:
    return torch.full((count,), 2 * rank + 3, dtype=dtype)


def check_step(step: int, present: list[int]) -> None:
    """Allreduces in every form, in which the ranks that have joined have no term."""
    n, r = hvd.size(), hvd.rank()
    values = [2 * rank + 3 for rank in present]
    total = sum(values)

    def wanted(number: float, dtype: torch.dtype = torch.float32, count: int = 6) -> torch.Tensor:
        return torch.full((count,), number, dtype=dtype)

    for op, number in (
        (hvd.Sum, total),
        (hvd.Min, min(values)),
        (hvd.Max, max(values)),
        (hvd.Product, math.prod(values)),
    ):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            same(
                hvd.allreduce(term(r, dtype), name=f"cached.{op}.{dtype}", op=op),
                wanted(number, dtype),
            )
    mean = wanted(total) * torch.tensor(1 / n)
    same(hvd.allreduce(term(r), name="cached"), mean)  # divides by the size
    same(hvd.allreduce(term(r, torch.int32), name="whole"), wanted(total // n, torch.int32))
    same(hvd.allreduce(term(r), name=f"new.{step}"), mean)
    same(hvd.allreduce(term(r)), mean)
    same(
        hvd.allreduce(term(r), op=hvd.Sum, prescale_factor=2, postscale_factor=3), wanted(6 * total)
    )
    same(hvd.allreduce(term(r), op=hvd.Sum, compression=hvd.Compression.fp16), wanted(total))
    same(hvd.allreduce(term(r, count=300_000), op=hvd.Sum), wanted(total, count=300_000))
    same(hvd.allreduce(torch.tensor(2.0 * r + 3), op=hvd.Sum), torch.tensor(float(total)))
    same(hvd.allreduce(torch.ones(0), op=hvd.Sum), torch.ones(0))
    along = hvd.allreduce(term(r), name="adasum", op=hvd.Adasum)  # all are parallel: their mean
    torch.testing.assert_close(along, wanted(total / len(present)))
    mine = term(r)
    assert hvd.allreduce_(mine, name="in place", op=hvd.Sum) is mine
    same(mine, wanted(total))
    fused = [
        hvd.allreduce_async_(term(r, count=i + 1), name=f"fused.{i}", op=hvd.Sum) for i in range(20)
    ]
    for i, handle in enumerate(fused):
        same(hvd.synchronize(handle), wanted(total, count=i + 1))
    group = [term(r), term(r, torch.float16), term(r, torch.int64)]
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
        for result, given in zip(call(group, name="group", op=hvd.Sum), group, strict=True):
            same(result, wanted(total, given.dtype))


@pytest.mark.np(2, 3)
def test_steps_that_differ_in_number() -> None:
    n, r = hvd.size(), hvd.rank()
    for round_ in range(3):
        steps = [STEPS[(rank + round_) % 3] for rank in range(n)]
        for step in range(steps[r]):
            check_step(step, [rank for rank in range(n) if steps[rank] > step])
        assert hvd.join() == steps.index(max(steps))
        check_step(0, list(range(n)))


@pytest.mark.np(1, 2, 3)
def test_all_ranks_learn_the_same_last_one() -> None:
    for late in range(hvd.size()):
        if hvd.rank() == late:
            time.sleep(0.02)  # whoever is last by chance, all must say the same
        last = hvd.join()
        assert hvd.allgather(torch.tensor([last])).tolist() == [last] * hvd.size()


@pytest.mark.np(2)
def test_a_rank_may_join_while_its_calls_are_in_flight() -> None:
    if hvd.rank() == 0:
        handles = [hvd.allreduce_async(torch.ones(1000), name=f"{i}", op=hvd.Sum) for i in range(9)]
        assert hvd.join() == 1
    else:
        time.sleep(0.02)
        handles = [hvd.allreduce_async(torch.ones(1000), name=f"{i}", op=hvd.Sum) for i in range(9)]
        same(hvd.allreduce(torch.ones(3), name="alone", op=hvd.Sum), torch.ones(3))
        assert hvd.join() == 1
    for handle in handles:
        same(hvd.synchronize(handle), torch.full((1000,), 2.0))


@pytest.mark.np(3)
def test_calls_without_a_name_match_again_after_a_join_in_sets_too() -> None:
    pair = hvd.add_process_set([0, 2])
    for _ in range(1 + 2 * hvd.rank()):
        hvd.allreduce(torch.ones(2))
        if hvd.rank() != 1:
            hvd.allreduce(torch.ones(2), process_set=pair)
    hvd.join()
    if hvd.rank() != 1:
        same(hvd.allreduce(term(hvd.rank()), op=hvd.Sum, process_set=pair), term(0) + term(2))
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), 3.0))
    assert hvd.remove_process_set(pair)


Calls = list[Callable[[torch.Tensor], object]]


def calls_beside_allreduce(root: int) -> Calls:
    sync = hvd.synchronize
    return [
        lambda t: hvd.allgather(t, name="x"),
        lambda t: sync(hvd.allgather_async(t, name="x")),
        lambda t: hvd.grouped_allgather([t, t], name="x"),
        lambda t: hvd.broadcast(t, root, name="x"),
        lambda t: hvd.broadcast_(t, root, name="x"),
        lambda t: hvd.alltoall(t, name="x"),
        lambda t: hvd.alltoall(t, [1] * hvd.size(), name="x"),
        lambda t: hvd.reducescatter(t, name="x"),
        lambda t: hvd.grouped_reducescatter([t, t], name="x"),
        lambda t: hvd.broadcast_object("text", root),
    ]


@pytest.mark.np(3)
def test_a_joined_rank_makes_other_collectives_fail() -> None:
    for warm in (False, True):
        calls = calls_beside_allreduce(0)
        if warm:
            for call in calls:
                call(torch.ones(6))
        if hvd.rank() != 2:
            for call in calls:
                started = time.monotonic()
                with pytest.raises(MismatchError, match="rank 2 has joined"):
                    call(torch.ones(6))
                assert time.monotonic() - started < 5
                same(hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum), torch.full((3,), 2.0))
        hvd.join()
        for call in calls:
            call(torch.ones(6))


@pytest.mark.np(3, env={"HOROVOD_JOIN_ALL_OPS": "1"})
def test_every_collective_leaves_out_joined_ranks_if_asked() -> None:
    r = hvd.rank()
    mine = torch.arange(6.0) + 10 * r
    both = torch.arange(6.0) * 2 + 10
    for _ in range(2):
        if r != 2:
            same(
                hvd.allgather(mine, name="x"),
                torch.cat([torch.arange(6.0), torch.arange(6.0) + 10]),
            )
            first, second = hvd.grouped_allgather([mine, mine[:r]], name="x")
            assert len(first) == 12
            same(second, torch.tensor([10.0]))
            for root in (0, 1):
                same(hvd.broadcast(mine, root, name="x"), torch.arange(6.0) + 10 * root)
                same(hvd.broadcast_(mine.clone(), root, name="x"), torch.arange(6.0) + 10 * root)
            with pytest.raises(hvd.HorovodInternalError, match="root rank 2 has joined"):
                hvd.broadcast(mine, 2, name="x")
            output, received = hvd.alltoall(mine, [1, 2, 3], name="x")
            assert received.tolist() == [r + 1, r + 1, 0]
            parts = [torch.arange(6.0)[r : 2 * r + 1], torch.arange(6.0)[r : 2 * r + 1] + 10]
            same(output, torch.cat(parts))
            same(hvd.reducescatter(mine, name="x", op=hvd.Sum), both[2 * r : 2 * r + 2])
            third = torch.tensor(1 / 3)
            same(hvd.reducescatter(mine, name="x"), both[2 * r : 2 * r + 2] * third)
            same(hvd.allreduce(mine, name="x", op=hvd.Sum), both)
        if r == 1:  # alone, so the last to join
            same(hvd.allgather(mine, name="y"), mine)
            same(hvd.broadcast(mine, 1, name="y"), mine)
        assert hvd.join() == 1
        assert hvd.allgather(mine[:1], name="x").tolist() == [0.0, 10.0, 20.0]
