"""Calls, handles, threads and memory: all but the values, which are test_conformance.py's."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest
import torch

import horovod.torch as hvd


def same(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    assert torch.equal(actual, wanted), (actual, wanted)


@pytest.mark.np(2)
def test_writing_in_place_leaves_the_neighbours_alone() -> None:
    base = torch.zeros(6, 8)
    view = base[::2, 1::3]
    view.fill_(hvd.rank() + 1)
    hvd.allreduce_(view, op=hvd.Sum)
    wanted = torch.zeros(6, 8)
    wanted[::2, 1::3] = 3
    same(base, wanted)


@pytest.mark.np(2)
def test_lazy_views_and_expanded_tensors() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    same(hvd.allreduce(value.conj(), op=hvd.Sum), torch.tensor([2 - 4j, 6 + 8j]))
    conjugate = value.clone().conj()
    hvd.allreduce_(conjugate, op=hvd.Sum)
    same(conjugate.resolve_conj(), torch.tensor([2 - 4j, 6 + 8j]))
    negative = value.conj().imag
    assert negative.is_neg()
    same(hvd.allreduce(negative, op=hvd.Sum), torch.tensor([-4.0, 8.0]))
    expanded = torch.tensor([hvd.rank() + 1.0]).expand(5)
    same(hvd.allreduce(expanded, op=hvd.Sum), torch.full((5,), 3.0))
    with pytest.raises(ValueError, match="expanded"):
        hvd.allreduce_(expanded, op=hvd.Sum)


@pytest.mark.np(2)
def test_leaves_and_inference_tensors_in_place() -> None:
    leaf = torch.nn.Parameter(torch.full((2, 3), float(hvd.rank())))
    assert hvd.broadcast_(leaf, 1) is leaf
    assert leaf.requires_grad and leaf.is_leaf
    same(leaf.data, torch.ones(2, 3))
    columns = torch.nn.Parameter(torch.full((2, 3), float(hvd.rank())).t())
    hvd.broadcast_(columns, 1)
    same(columns.data, torch.ones(3, 2))
    with torch.inference_mode():
        inside = torch.full((2, 3), float(hvd.rank()))
        strided = torch.full((2, 3), float(hvd.rank())).t()
    for tensor in (inside, strided):
        hvd.allreduce_(tensor, op=hvd.Sum)
        same(tensor.clone(), torch.ones(tensor.shape))


@pytest.mark.np(2)
def test_autograd_notices_an_overwritten_tensor() -> None:
    weight = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    loss = (weight * saved).sum()
    hvd.allreduce_(saved, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.np(1, 2)
def test_groups_are_lists_or_tuples() -> None:
    tensors = [torch.ones(2), torch.ones(4, dtype=torch.int32)]
    for call, kind in (
        (hvd.grouped_allreduce, list),
        (hvd.grouped_allreduce_, tuple),
        (hvd.grouped_allgather, tuple),
        (hvd.grouped_reducescatter, list),
        (lambda given: hvd.synchronize(hvd.grouped_allreduce_async(given)), tuple),
        (lambda given: hvd.synchronize(hvd.grouped_allgather_async(given)), tuple),
        (lambda given: hvd.synchronize(hvd.grouped_reducescatter_async(given)), tuple),
    ):
        assert type(call(tensors)) is kind
        assert type(call(iter(tensors))) is kind
        with pytest.raises(ValueError, match="empty"):
            call([])


@pytest.mark.np(2)
def test_average_comes_second_and_name_third() -> None:
    value = torch.full((2,), float(hvd.rank()))
    with pytest.warns(DeprecationWarning, match="op="):
        same(hvd.allreduce(value, False, "third"), torch.ones(2))
    with pytest.warns(DeprecationWarning, match="op="):
        same(hvd.allreduce(value, average=True), torch.full((2,), 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(hvd.allreduce_(value.clone(), None, "third", hvd.Sum), torch.ones(2))
        same(hvd.allreduce(value), torch.full((2,), 0.5))
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(value, average=True, op=hvd.Sum)
    with pytest.raises(TypeError, match="name="):
        hvd.allreduce(value, "a name")
    with pytest.raises(ValueError, match="none of"):
        hvd.allreduce(value, op=17)


@pytest.mark.np(2)
def test_handles() -> None:
    first = hvd.allreduce_async(torch.ones(3), name="first", op=hvd.Sum)
    second = hvd.allreduce_async(torch.ones(3), name="second", op=hvd.Sum)
    assert isinstance(first, int) and second == first + 1
    same(hvd.synchronize(second), torch.full((3,), 2.0))
    assert hvd.poll(first) in (True, False)
    same(hvd.synchronize(np.int64(first)), torch.full((3,), 2.0))
    assert hvd.synchronize(first) is None
    assert hvd.synchronize(10**9) is None
    for wrong in (None, "1", 1.0, [first]):
        with pytest.raises(TypeError):
            hvd.synchronize(wrong)  # type: ignore[arg-type]
    for unknown in (first, 10**9):
        with pytest.raises(ValueError, match="unknown"):
            hvd.poll(unknown)
    if hvd.rank() == 1:
        hvd.barrier()
    handles = [hvd.allreduce_async(torch.ones(10**5), name=f"{i}") for i in range(20)]
    if hvd.rank() == 0:
        assert not any(hvd.poll(handle) for handle in handles)
        hvd.barrier()
    for handle in handles:
        while not hvd.poll(handle):
            pass
        hvd.synchronize(handle)


@pytest.mark.np(2, env={})
def test_handles_count_from_one_after_every_init() -> None:
    for _ in range(2):
        assert [hvd.allreduce_async(torch.ones(1)) for _ in range(3)] == [1, 2, 3]
        assert [hvd.synchronize(handle).item() for handle in (3, 1, 2)] == [1.0] * 3
        hvd.shutdown()
        hvd.init()


@pytest.mark.np(2, 3)
def test_ranks_may_submit_in_any_order() -> None:
    names = [f"tensor.{i}" for i in range(60)]
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        order = torch.randperm(len(names)).tolist()
        handles = {i: hvd.allreduce_async(torch.full((i + 1,), i), name=names[i]) for i in order}
        for i in torch.randperm(len(names)).tolist():
            same(hvd.synchronize(handles[i]), torch.full((i + 1,), i))


@pytest.mark.np(2)
def test_eight_threads_at_once() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                value = torch.full((number + 1,), float(i))
                result = hvd.allreduce(value, name=f"thread.{number}.{i % 3}", op=hvd.Sum)
                same(result, 2 * value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.np(2)
def test_one_of_several_waiting_threads_gets_the_result() -> None:
    for i in range(20):
        if hvd.rank() == 1:
            hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="shared")
        results: list[object] = []
        threads = [
            threading.Thread(target=lambda: results.append(hvd.synchronize(handle)))  # noqa: B023
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        if hvd.rank() == 0:
            hvd.barrier()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        assert sum(result is not None for result in results) == 1, i


@pytest.mark.np(2)
def test_inputs_live_as_long_as_they_are_needed() -> None:
    handles = []
    for i in range(50):
        value = torch.full((20_000,), float(i))
        strided = torch.full((200, 100), float(i)).t()
        handles.append((i, hvd.allreduce_async(value, name=f"gone.{i}", op=hvd.Sum)))
        handles.append((i, hvd.allgather_async(strided, name=f"gone.{i}")))
        value.set_(torch.zeros(1))
        strided.data = torch.zeros(1)
        del value, strided
        torch.zeros(20_000)  # takes the place of freed memory
    for i, handle in handles:
        result = hvd.synchronize(handle)
        assert torch.equal(result, torch.full_like(result, 2 * i if result.dim() == 1 else i))


@pytest.mark.np(3)
def test_barrier_and_process_sets() -> None:
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() == 1:
        for call in (
            lambda: hvd.allreduce(torch.ones(1), process_set=pair),
            lambda: hvd.barrier(pair),
        ):
            with pytest.raises(ValueError, match="rank 1 is not in"):
                call()
    else:
        mine = torch.full((4,), float(hvd.rank()))
        for _ in range(2):  # unnamed calls of a set don't count for the other ranks
            same(hvd.allreduce(mine, process_set=pair), torch.ones(4))
        same(hvd.allgather(mine[:1], process_set=pair), torch.tensor([0.0, 2.0]))
        same(hvd.broadcast(mine, 2, process_set=pair), torch.full((4,), 2.0))
        same(hvd.reducescatter(mine, op=hvd.Sum, process_set=pair), torch.full((2,), 2.0))
        place = pair.rank()
        wanted = torch.tensor([0.0, 0.0, 2.0, 2.0])
        same(hvd.alltoall(mine, process_set=pair), wanted)
        assert place == hvd.rank() // 2
        with pytest.raises(ValueError, match="root"):
            hvd.broadcast(mine, 1, process_set=pair)
        hvd.barrier(process_set=pair)
    handles = [hvd.allreduce_async(torch.ones(100), name=f"around.{i}") for i in range(20)]
    hvd.barrier()
    for handle in handles:
        hvd.synchronize(handle)
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), 3.0))
    assert hvd.remove_process_set(pair)
    for wrong in (None, 3, [0, 1]):
        with pytest.raises(TypeError, match="process_set must be a ProcessSet"):
            hvd.allreduce(torch.ones(2), process_set=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=pair)


@pytest.mark.np(2)
def test_thousands_of_operations_leak_nothing() -> None:
    def resident_kib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    value = torch.ones(64)

    def work(times: int) -> None:
        for _ in range(times):
            hvd.synchronize(hvd.allreduce_async_(value, name="again", op=hvd.Max))
            hvd.synchronize(hvd.allgather_async(value[:2], name="again"))

    work(1000)
    before = resident_kib()
    work(3000)
    assert resident_kib() - before < 300  # 51 bytes an operation
