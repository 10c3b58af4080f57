"""Divides a data set among ranks without loss or repetition; must not know how data travels."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from torch.utils.data import Dataset, Subset

from horovod.common import basics, objects, ops
from horovod.common.exceptions import MismatchError
from horovod.common.ops import Call, synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.gather import as_bytes, as_tensor, gather_plain
from horovod.torch.ops import submit
from horovod.torch.views import TO_ENGINE

_ROUND_BYTES = 4 << 20  # for each rank, before the root sends what it has


def shard_dataset(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Subset[Any]:
    """This member's part of a data set that every member can read.

    Each sample is in exactly one member's part: nothing is repeated to make parts equal and nothing
    is left out, so that parts differ in length by at most one. With a batch more on some ranks than
    on others, end an epoch with `join`. Blocks until every member has called it.

    Args:
        dataset: with ``len()``, of the same length on all members. Samples are read when used.
        shuffle: deals out a random permutation instead of runs of neighbours. For another one each
            epoch, call this each epoch with another seed.
        seed: of the permutation, the same on all members.
        process_set: who takes part.

    Returns:
        The part. Of n samples the first ``n % members`` ranks have one more than the others.

    Raises:
        MismatchError: on every member: length, shuffle or seed differ.
        TypeError: the data set has no length; the others get a HorovodInternalError.

    Source: the idea of ChainerMN's scatter_dataset.
    """

    def plain() -> list[Any]:
        return [_length(dataset), bool(shuffle), int(seed)]

    gathered = gather_plain("shard_dataset", plain, process_set)
    ranks = ops.ranks(process_set)
    for rank, other in zip(ranks, gathered, strict=True):
        if other != gathered[0]:
            what = "length {}, shuffle={}, seed={}"
            submitted = (
                f"rank {ranks[0]}: {what.format(*gathered[0])}; rank {rank}: {what.format(*other)}"
            )
            raise MismatchError(f"shard_dataset: ranks disagree: {submitted}", submitted=submitted)
    parts = _parts(len(dataset), shuffle, seed, ops.members(process_set))  # type: ignore[arg-type]
    return Subset(dataset, parts[ops.index(process_set)])


def scatter_dataset(
    dataset: Any,
    root_rank: int = 0,
    shuffle: bool = False,
    seed: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """This member's part of a data set that only the root can read.

    Parts are those of `shard_dataset`. The root reads every sample once and sends each to the one
    member that gets it. Blocks until every member has called it.

    Args:
        dataset: with ``len()`` and indices, of samples that cloudpickle can send; counts on the
            root only, pass None elsewhere.
        root_rank: global rank of the member whose data set counts.
        shuffle: deals out a random permutation; counts on the root only.
        seed: of the permutation; counts on the root only.
        process_set: who takes part.

    Returns:
        The samples, which a `torch.utils.data.DataLoader` takes as they are.

    Raises:
        ValueError: the root isn't in the set.
        HorovodInternalError: reading, pickling or unpickling failed on a member, or one is lost. On
            the member itself, it may be the exception that happened.
    """
    ranks, own = ops.ranks(process_set), ops.index(process_set)
    if root_rank not in ranks:
        raise ValueError(f"scatter_dataset: rank {root_rank} is not in {process_set}")
    name = ops.next_name(process_set, "scatter_dataset")
    is_root = basics.rank() == root_rank
    mine: list[Any] = []
    rounds: Iterator[list[bytes]] | None = None
    error: Exception | None = None
    more = True
    while more:
        with Call(ops.ALLTOALL, name, process_set) as call:
            if is_root and rounds is None:
                parts = _parts(_length(dataset), shuffle, seed, len(ranks))
                rounds = _rounds(dataset, parts, own, mine)
            messages = next(rounds) if rounds is not None else [b""] * len(ranks)
            splits = [len(message) for message in messages]
            handle = submit(call, (as_tensor(b"".join(messages)),), TO_ENGINE, splits=splits)
        message = io.BytesIO(as_bytes(synchronize(handle)))
        more = pickle.load(message)
        try:
            while not error and message.tell() < message.getbuffer().nbytes:
                mine.append(pickle.load(message))
        except Exception as failure:  # users' own __setstate__ may raise anything
            error = failure
    objects.agree(name, "unpickle its samples", error, process_set)
    return mine


def _rounds(
    dataset: Any, parts: list[Sequence[int]], own: int, mine: list[Any]
) -> Iterator[list[bytes]]:
    """What the root sends to each member, some megabytes at a time; its own samples go to `mine`.

    A message is a row of pickles: whether another round follows, then samples.
    """
    left = [iter(part) for part in parts]
    counts = [len(part) for part in parts]
    while True:
        bodies = [bytearray() for _ in parts]
        for member, body in enumerate(bodies):
            while counts[member] and len(body) < _ROUND_BYTES:
                counts[member] -= 1
                sample = dataset[next(left[member])]
                if member == own:
                    mine.append(sample)
                else:
                    body += cloudpickle.dumps(sample)
        more = any(counts)
        yield [pickle.dumps(more) + body for body in bodies]
        if not more:
            return


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        kind = type(dataset).__name__
        raise TypeError(f"a data set with len() is needed, which a {kind} has not") from error


def _parts(length: int, shuffle: bool, seed: int, members: int) -> list[Sequence[int]]:
    """Disjoint and complete: neighbours of the order, the first ones longer by one."""
    order: Sequence[int] = range(length)
    if shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    each, longer = divmod(length, members)
    ends = [member * each + min(member, longer) for member in range(members + 1)]
    return [order[start:end] for start, end in itertools.pairwise(ends)]
