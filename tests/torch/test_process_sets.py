"""Sets of ranks: results, ids, overlap in time, changes under calls in flight, and outsiders."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common import basics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ids_and_ranks


@contextmanager
def registered(*sets: Sequence[int]) -> Iterator[list[Any]]:
    added = [hvd.add_process_set(ranks) for ranks in sets]
    yield added
    for process_set in reversed(added):
        assert hvd.remove_process_set(process_set)


def full(value: float, count: int = 4) -> torch.Tensor:
    return torch.full((count,), float(value))


@pytest.mark.np(4)
def test_an_average_is_over_the_members_and_outsiders_learn_at_once() -> None:
    me = hvd.rank()
    with registered([0, 1], [2, 3], [0, 2, 3]) as sets:
        for process_set in sets:
            members = process_set.ranks
            average = full(sum(members) / len(members))
            if me in members:
                got = hvd.allreduce(full(me), name="average", process_set=process_set)
                torch.testing.assert_close(got, average)
                in_place = full(me)
                hvd.allreduce_(in_place, op=hvd.Average, process_set=process_set)
                torch.testing.assert_close(in_place, average)
                grouped = hvd.grouped_allreduce([full(me)] * 3, process_set=process_set)
                for each in grouped:
                    torch.testing.assert_close(each, average)
                part = hvd.reducescatter(full(me, len(members)), process_set=process_set)
                torch.testing.assert_close(part, average[:1])
                continue
            begin = time.monotonic()
            for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
                with pytest.raises(ValueError, match=f"rank {me} is not in"):
                    call(full(me), process_set=process_set)
            with pytest.raises(ValueError, match=f"rank {me} is not in"):
                hvd.broadcast(full(me), members[0], process_set=process_set)
            with pytest.raises(ValueError, match=f"rank {me} is not in"):
                hvd.barrier(process_set=process_set)
            assert time.monotonic() - begin < 2


@pytest.mark.np(4)
def test_disjoint_sets_use_the_same_names_and_do_not_wait_for_each_other() -> None:
    me = hvd.rank()
    with registered([0, 1], [2, 3], [1, 2]) as (low, high, between):
        mine = low if me < 2 else high
        if me == 1:  # low can't go on before high is through
            hvd.barrier(process_set=between)
        names = [f"x{i}" for i in range(10)]
        handles = {}
        for i, name in enumerate(names):
            call = (hvd.allreduce_async, hvd.allgather_async)[(i + me // 2) % 2]
            handles[name] = call(full(me), name=name, process_set=mine)
        for name, handle in handles.items():
            # What one set does under the name is none of the other's business.
            i = names.index(name)
            average = full(sum(mine.ranks) / 2)
            gathered = torch.cat([full(rank) for rank in mine.ranks])
            assert torch.equal(hvd.synchronize(handle), (average, gathered)[(i + me // 2) % 2])
        if me == 2:
            hvd.barrier(process_set=between)


@pytest.mark.np(4)
def test_barriers_among_twenty_calls_in_flight() -> None:
    me = hvd.rank()
    with registered([0, 1, 3]) as (three,):
        sets = [hvd.global_process_set, three] if me != 2 else [hvd.global_process_set]
        for round_number in range(3):
            handles = []
            for i, process_set in itertools.product(range(20), sets):
                if i == 7 * round_number:
                    hvd.barrier(process_set=process_set)
                name = f"y{i * (7 if me % 2 else 1) % 20}"  # in another order on odd ranks
                call = hvd.allreduce_async(full(me), name=name, op=hvd.Sum, process_set=process_set)
                handles.append((process_set, call))
            for process_set in sets:
                hvd.barrier(process_set=process_set)
            for process_set, handle in handles:
                assert torch.equal(hvd.synchronize(handle), full(sum(process_set.ranks)))


@pytest.mark.np(4)
def test_ids_are_small_used_again_in_order_and_equal_everywhere() -> None:
    known: dict[int, list[int]] = dict(ids_and_ranks())

    def check() -> None:
        assert ids_and_ranks() == known
        everyones = hvd.allgather_object(ids_and_ranks())
        assert everyones == [everyones[0]] * hvd.size()

    def add(ranks: list[int], wanted: int) -> Any:
        added = hvd.add_process_set(ranks)
        assert added.process_set_id == wanted
        known[wanted] = ranks
        return added

    def remove(process_set: Any) -> None:
        del known[process_set.process_set_id]
        hvd.remove_process_set(process_set)
        assert process_set.process_set_id is None

    # Other tests in this world may have used ids.
    first = [hvd.add_process_set([rank]) for rank in range(4)]
    ids = [each.process_set_id for each in first]
    assert len(set(ids)) == 4 and 0 not in ids
    known = dict(ids_and_ranks())
    check()
    remove(first[2])
    remove(first[0])
    one, two = add([0, 1], ids[2]), add([1, 2], ids[0])
    new = add([0, 2], max(known) + 1)
    check()
    # The number's earlier set had calls without names; these count on their own.
    if hvd.rank() < 2:
        assert torch.equal(hvd.allreduce(full(1), process_set=one), full(1))
    for each in (new, two, one, first[1], first[3]):
        remove(each)
    check()
    again = add([0, 3], new_id := max(ids) + 1)
    assert new_id == again.process_set_id
    remove(again)


@pytest.mark.np(4)
def test_two_hundred_sets_leave_nothing_behind() -> None:
    me = hvd.rank()
    engine = basics.engine()

    def held() -> dict[str, int]:
        return {
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "sets": len(engine.process_sets()),
            "pending": len(engine.pending()),
        }

    choices = [[0, 1], [1, 2, 3], [2], [0, 3]]
    before: dict[str, int] = {}
    ids = set()
    for i in range(200):
        if i == 10:
            before = held()
        process_set = hvd.add_process_set(choices[i % 4])
        ids.add(process_set.process_set_id)
        if i % 5 == 0 and process_set.included():
            got = hvd.allreduce(full(me), process_set=process_set)
            members = choices[i % 4]
            torch.testing.assert_close(got, full(sum(members) / len(members)))
        assert hvd.remove_process_set(process_set)
    assert held() == before
    assert len(ids) <= 5  # free ones are used again


@pytest.mark.np(4)
def test_a_set_removed_under_a_pending_call_ends_it() -> None:
    me = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    handle = None
    if me == 0:
        handle = hvd.allreduce_async(full(1), name="alone", process_set=pair)
    if me < 2:
        finished = hvd.allreduce_async(full(1), name="both", process_set=pair)
    assert hvd.remove_process_set(pair)
    begin = time.monotonic()
    if handle is not None:
        with pytest.raises(HorovodInternalError, match="removed while this call was pending"):
            hvd.synchronize(handle)
    if me < 2:
        try:
            assert torch.equal(hvd.synchronize(finished), full(1))
        except HorovodInternalError as error:  # the removal came first
            assert "removed" in str(error)
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(full(1), process_set=pair)
    assert time.monotonic() - begin < 5
    assert torch.equal(hvd.allreduce(full(1)), full(1))


@pytest.mark.np(4)
def test_ranks_that_disagree_all_learn_of_it() -> None:
    me = hvd.rank()
    begin = time.monotonic()
    with pytest.raises(ValueError, match="ranks 0-1, 3 sent ranks 0-1, rank 2 ranks 0, 2"):
        hvd.add_process_set([0, 2] if me == 2 else [0, 1])
    assert time.monotonic() - begin < 5
    with registered([0, 1], [2, 3]) as (low, high):
        before = ids_and_ranks()
        begin = time.monotonic()
        with pytest.raises(HorovodInternalError):
            hvd.remove_process_set(high if me == 3 else low)
        assert time.monotonic() - begin < 5
        assert ids_and_ranks() == before
        mine = low if me < 2 else high
        assert torch.equal(hvd.allreduce(full(1), process_set=mine), full(1))


@pytest.mark.np(3)
def test_a_mistake_in_one_ranks_addition_is_an_error_for_the_others() -> None:
    me = hvd.rank()
    mistakes: list[tuple[Any, str]] = [
        ([0, 99], "outside 0 to 2"),
        ([1, 1], "twice"),
        ([], "at least one"),
        (5, "made of ranks, not of a int"),
        (["\udc80"], "made of integers"),
        ([0, 1, 2], "process set 0 already"),
    ]
    begin = time.monotonic()
    for i, (wrong, words) in enumerate(mistakes):
        if me == i % 3:
            with pytest.raises(ValueError, match=words):
                hvd.add_process_set(wrong)
        else:
            with pytest.raises(ValueError, match=f"rank {i % 3}'s call failed there.*{words}"):
                hvd.add_process_set([0, 2])
        with pytest.raises(ValueError, match=words):  # the same mistake everywhere
            hvd.add_process_set(wrong)
        assert list(ids_and_ranks()) == [0]
        with registered([0, 2]) as (pair,):  # the calls after it match again
            if me != 1:
                got = hvd.allreduce(full(me), op=hvd.Sum, process_set=pair)
                assert torch.equal(got, full(2))
            stranger = hvd.ProcessSet([0, 1])
            assert not hvd.remove_process_set(stranger)  # is nobody else's business
    assert time.monotonic() - begin < 5


@pytest.mark.np(2)
def test_a_pickled_set_is_the_registered_one_of_its_ranks_where_it_is_read() -> None:
    def there_and_back(process_set: Any) -> Any:
        return pickle.loads(pickle.dumps(process_set))

    with registered([0], [1]) as sets:
        for process_set in (*sets, hvd.global_process_set):
            assert there_and_back(process_set) is process_set
        # Also one that another rank registered.
        assert hvd.broadcast_object(sets[1], root_rank=0) is sets[1]
        fresh = there_and_back(hvd.ProcessSet([1, 0]))
        assert (fresh.process_set_id, fresh.ranks) == (None, [0, 1])
        late = pickle.dumps(sets[1])
        assert hvd.remove_process_set(sets.pop())
        stale = pickle.loads(late)
        assert (stale.process_set_id, stale.uid, stale.ranks) == (None, None, [1])
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(full(1), process_set=stale)
        sets.append(hvd.add_process_set(stale))
        assert pickle.loads(late) is stale


@pytest.mark.np(2)
def test_init_binds_again_and_a_restart_starts_over() -> None:
    with registered([0], [1]) as (first, second):
        same = hvd.ProcessSet([1])
        hvd.init(process_sets=[same])
        assert same.process_set_id == second.process_set_id
        stale = first.process_set_id
    kept = [hvd.add_process_set([rank]) for rank in range(2)]
    hvd.shutdown()
    assert all(each.process_set_id is None for each in [*kept, same])
    hvd.init(process_sets="dynamic")
    assert stale is not None and list(ids_and_ranks()) == [0]
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(full(1), process_set=kept[hvd.rank()])
    third = hvd.add_process_set([1])
    assert third.process_set_id == 1
    if hvd.rank() == 1:
        assert torch.equal(hvd.allreduce(full(5), process_set=third), full(5))
    hvd.remove_process_set(third)
