"""Shards of a data set are disjoint, complete and of nearly equal length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError
from horovod.torch import sharding


class Items:
    """What only the root has; its samples are objects of any kind."""

    def __init__(self, length: int, size: int = 1) -> None:
        self.length, self.size = length, size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.read.append(index)
        return {"index": index, "data": bytes(self.size) + bytes([index % 251])}


def is_a_partition(parts: list[list[int]], length: int) -> None:
    assert sorted(index for part in parts for index in part) == list(range(length))
    lengths = [len(part) for part in parts]
    assert sorted(lengths, reverse=True) == lengths
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_for_any_length_and_number_of_members(shuffle: bool) -> None:
    for members in (1, 2, 3, 7):
        for length in (0, 1, members - 1, members, members + 1, 100):
            parts = sharding._parts(length, shuffle, 3, members)
            is_a_partition([list(part) for part in parts], length)


@pytest.mark.np(1, 2, 3)
def test_shards_are_disjoint_and_complete() -> None:
    dataset = TensorDataset(torch.arange(11) * 10)
    orders = set()
    for options in ({}, {"shuffle": True}, {"shuffle": True, "seed": 1}):
        shard = hvd.shard_dataset(dataset, **options)
        seen = [int(row) for (batch,) in DataLoader(shard, batch_size=2) for row in batch]
        assert len(seen) == len(shard)
        parts = hvd.allgather_object([value // 10 for value in seen])
        is_a_partition(parts, 11)
        orders.add(str(parts))
    assert len(orders) == 3
    assert len(hvd.shard_dataset([], shuffle=True)) == 0  # type: ignore[arg-type]


@pytest.mark.np(2)
def test_ranks_that_differ_are_told_so() -> None:
    for own in ({"dataset": range(5 + hvd.rank())}, {"dataset": range(5), "seed": hvd.rank()}):
        with pytest.raises(MismatchError, match=r"rank 0: length 5, .*seed=0; rank 1: length"):
            hvd.shard_dataset(**own)  # type: ignore[arg-type]
    dataset: Any = iter(range(4)) if hvd.rank() else range(4)
    error = TypeError if hvd.rank() else hvd.HorovodInternalError
    with pytest.raises(error, match="a data set with len"):
        hvd.shard_dataset(dataset)
    assert len(hvd.shard_dataset(range(4))) == 2  # type: ignore[arg-type]


@pytest.mark.np(1, 2, 3)
def test_scattered_parts_are_those_of_shards() -> None:
    for root in {0, hvd.size() - 1}:
        for length in (0, 2, 11):
            for shuffle in (False, True):
                items = Items(length) if hvd.rank() == root else None
                part = hvd.scatter_dataset(items, root, shuffle, seed=5)
                expected = hvd.shard_dataset(range(length), shuffle, seed=5)  # type: ignore[arg-type]
                assert [sample["index"] for sample in part] == list(expected)
                if items is not None:
                    assert sorted(items.read) == list(range(length))


@pytest.mark.np(2)
def test_scattering_goes_in_rounds() -> None:
    before, sharding._ROUND_BYTES = sharding._ROUND_BYTES, 5000
    try:
        part = hvd.scatter_dataset(Items(101, size=900) if hvd.rank() == 1 else None, root_rank=1)
    finally:
        sharding._ROUND_BYTES = before
    is_a_partition(hvd.allgather_object([sample["index"] for sample in part]), 101)
    assert all(sample["data"][-1] == sample["index"] % 251 for sample in part)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("never to be sent")


class Unloadable:
    def __reduce__(self) -> Any:
        return load, ()


def load() -> None:
    if hvd.rank() == 1:
        raise RuntimeError("never to be loaded")


class Broken(Items):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("a bad disk")


@pytest.mark.np(2, 3)
def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    is_root = hvd.rank() == 0
    for dataset, text in (
        ([Unpicklable()] * 4, "never to be sent"),
        ([Unloadable()] * 4, "rank 1 could not unpickle its samples.*never to be loaded"),
        (Broken(4), "a bad disk"),
        (5, "a data set with len"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=text):
            hvd.scatter_dataset(dataset if is_root else None)
    with pytest.raises(ValueError, match="is not in"):
        hvd.scatter_dataset([1], root_rank=hvd.size())
    assert len(hvd.scatter_dataset([1, 2, 3, 4, 5, 6] if is_root else None)) == 6 // hvd.size()
