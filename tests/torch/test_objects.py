"""Objects of any kind and size reach the other ranks, or fail on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import horovod.torch as hvd
from horovod.common import ops

BIG = 9 << 20  # several chunks


class Unpicklable:
    """What pickling raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error or RuntimeError("never to be sent")

    def __reduce__(self) -> Any:
        raise self.error


class Unloadable:
    """Raises where it is unpickled on rank `where`, is that number on the others."""

    def __init__(self, where: int, kind: type[BaseException] = RuntimeError) -> None:
        self.parts = where, kind

    def __reduce__(self) -> Any:
        return load, self.parts


def load(where: int, kind: type[BaseException]) -> int:
    if hvd.rank() == where:
        raise kind("never to be loaded")
    return where


@pytest.mark.np(1, 2, 3)
def test_objects() -> None:
    n, r = hvd.size(), hvd.rank()
    for value in (
        None,
        0,
        "text",
        {"a": torch.ones(3), "b": [1, (2,)], "c": torch.nn.Linear(2, 2).state_dict()},
        lambda x: x + 1,
        b"x" * 70,
        list(range(10_000)),
    ):
        for root in range(n):
            mine = value if r == root else torch.zeros(5)  # of another type than the root's
            result = hvd.broadcast_object(mine, root_rank=root)
            assert result is value if r == root else type(result) is type(value)
        results = hvd.allgather_object(value)
        assert len(results) == n
    assert hvd.allgather_object("x" * r * 1000, name="sizes") == ["x" * k * 1000 for k in range(n)]
    assert hvd.allgather_object(None) == [None] * n
    mine = [r]
    assert hvd.allgather_object(mine)[r] is not mine  # a change of one is no change of the other
    assert hvd.broadcast_object({"rank": r}, 0, name="named") == {"rank": 0}


@pytest.mark.np(2, 3)
def test_objects_of_several_chunks() -> None:
    r = hvd.rank()

    def value(rank: int) -> dict[str, Any]:
        return {
            "bytes": bytes([rank]) * BIG,
            "array": np.asfortranarray(np.arange(BIG / 8).reshape(2, -1) + rank),
            "tensor": torch.full((BIG // 4,), rank),
            "numbers": list(range(rank, 300_000)),
        }

    def check(got: dict[str, Any], rank: int) -> None:
        wanted = value(rank)
        assert got["bytes"] == wanted["bytes"] and got["numbers"] == wanted["numbers"]
        assert np.array_equal(got["array"], wanted["array"])
        assert torch.equal(got["tensor"], wanted["tensor"])

    check(hvd.broadcast_object(value(1) if r == 1 else None, 1), 1)
    gathered = hvd.allgather_object(value(r) if r else r)  # of very different sizes
    assert gathered[0] == 0
    for rank in range(1, hvd.size()):
        check(gathered[rank], rank)


@pytest.mark.np(2)
def test_a_small_object_costs_two_calls_and_the_agreement() -> None:
    made = 0
    synchronize = ops.synchronize

    def counted(handle: int) -> Any:
        nonlocal made
        made += 1
        return synchronize(handle)

    ops.synchronize = counted
    try:
        hvd.broadcast_object({"a": 1})
        assert made == 3
        hvd.allgather_object({"a": 1})
        assert made == 6
    finally:
        ops.synchronize = synchronize


def failing(r: int) -> list[tuple[Callable[[], Any], str]]:
    """Calls that fail on one of three ranks, at their first chunk and amid a stream, and how."""
    bad = Unpicklable() if r == 1 else 1
    big = bytes(BIG)
    return [
        (lambda: hvd.allgather_object(bad), "rank 1 could not pickle.*never to be sent"),
        (lambda: hvd.allgather_object([big, bad]), "rank 1 could not pickle.*never to be sent"),
        (lambda: hvd.allgather_object(Unloadable(2)), "rank 2 could not unpickle.*never"),
        (lambda: hvd.allgather_object([Unloadable(0), big]), "rank 0 could not unpickle"),
        (lambda: hvd.allgather_object([big, Unloadable(2)]), "rank 2 could not unpickle"),
        (lambda: hvd.broadcast_object(bad, 1), "rank 1 could not pickle.*never to be sent"),
        (lambda: hvd.broadcast_object([big, bad], 1), "rank 1 could not pickle.*never to be sent"),
        (lambda: hvd.broadcast_object(Unloadable(0), 2), "rank 0 could not unpickle.*never"),
        (lambda: hvd.broadcast_object([Unloadable(0), big], 2), "rank 0 could not unpickle"),
        (lambda: hvd.broadcast_object([big, Unloadable(0)], 2), "rank 0 could not unpickle"),
        (lambda: hvd.broadcast_object([big, Unloadable(0)], 2, name="x"), "rank 0 could not un"),
    ]


@pytest.mark.np(3)
def test_objects_that_cannot_be_sent_fail_everywhere() -> None:
    r = hvd.rank()
    for call, text in failing(r):
        started = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError, match=text) as caught:
            call()
        assert time.monotonic() - started < 5
        assert caught.value.rank == int(text[5])
        assert hvd.allgather_object(r) == [0, 1, 2]
        assert hvd.broadcast_object(r, 2) == 2


@pytest.mark.np(2)
def test_an_interrupt_while_pickling_is_none_of_ours_to_keep() -> None:
    r = hvd.rank()
    big = bytes(BIG)
    for call in (
        lambda: hvd.broadcast_object(Unpicklable(KeyboardInterrupt()), 1),
        lambda: hvd.broadcast_object([big, Unpicklable(KeyboardInterrupt())], 1),
        lambda: hvd.broadcast_object([Unloadable(1, KeyboardInterrupt), big], 0),
        lambda: hvd.allgather_object(Unpicklable(KeyboardInterrupt()) if r else 0),
        lambda: hvd.allgather_object(Unloadable(1, KeyboardInterrupt)),
    ):
        with pytest.raises(KeyboardInterrupt if r == 1 else hvd.HorovodInternalError):
            call()
        assert hvd.allgather_object(r) == [0, 1]


@pytest.mark.np(3)
def test_a_large_object_needs_little_memory_beside_itself() -> None:
    size, spare = 64, 32  # MiB
    value = bytes(size << 20)

    def grows(call: Callable[[], Any]) -> float:
        """By how many MiB the process is larger during the call than before, at most."""
        hvd.barrier()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak
        before = status("VmRSS")
        result = call()
        assert result is not None
        return (status("VmHWM") - before) / 1024

    def status(field: str) -> int:
        with open("/proc/self/status") as file:
            return int(next(line for line in file if line.startswith(field)).split()[1])

    is_root = hvd.rank() == 1
    grown = grows(lambda: hvd.broadcast_object(value if is_root else None, 1))
    assert grown < (0 if is_root else size) + spare
    # Three objects, and what this rank's own was pickled into.
    assert grows(lambda: hvd.allgather_object(value)) < 4 * size + spare


@pytest.mark.np(3)
def test_objects_in_a_process_set() -> None:
    pair = hvd.add_process_set([1, 2])
    if hvd.rank() > 0:
        assert hvd.broadcast_object(hvd.rank(), 2, process_set=pair) == 2
        assert len(hvd.broadcast_object(bytes(BIG), 1, process_set=pair)) == BIG
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 could not pickle"):
            hvd.broadcast_object(Unpicklable(), 1, process_set=pair)
        with pytest.raises(ValueError, match="root"):
            hvd.broadcast_object(1, 0, process_set=pair)
    hvd.remove_process_set(pair)
    assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]
