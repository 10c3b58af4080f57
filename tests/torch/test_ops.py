"""What each collective gives, for every data type, layout, shape and form."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

import horovod.torch as hvd

INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
EVERYTHING = [*INTEGERS, *FLOATS, torch.bool, *COMPLEX]
OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]


def made(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What `rank` puts in; every rank can make every rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low = 0 if dtype in (torch.uint8, torch.uint16) else -20
    return torch.randint(low, 20, shape, generator=generator).to(dtype)


def expected(op: int, terms: list[torch.Tensor]) -> torch.Tensor:
    """The left fold in rank order; 16-bit floats in float32 and rounded once."""
    dtype = terms[0].dtype
    if dtype in (torch.float16, torch.bfloat16):
        terms = [term.float() for term in terms]
    if dtype is torch.uint16:  # torch has few kernels for it
        terms = [term.int() for term in terms]
    result = terms[0].clone()
    for term in terms[1:]:
        if op in (hvd.Sum, hvd.Average):
            result = result | term if dtype is torch.bool else result + term
        elif op == hvd.Product:
            result = result & term if dtype is torch.bool else result * term
        elif op == hvd.Min:
            result = torch.minimum(result, term)
        else:
            result = torch.maximum(result, term)
    if op == hvd.Average:
        if result.is_floating_point() or result.is_complex():
            result = result / len(terms)
        else:
            if dtype not in (torch.uint16, torch.int64):
                result = result.to(dtype)  # sums wrap before the division
            result = torch.div(result, len(terms), rounding_mode="trunc")
    return result.to(dtype)


def same(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    if actual.dtype is torch.uint16:
        actual, wanted = actual.int(), wanted.int()
    if actual.is_complex() or (actual.is_floating_point() and hvd.size() not in (1, 2, 4)):
        # Complex products and divisions by 3 may round once more or less than torch's.
        torch.testing.assert_close(actual, wanted)
    else:
        assert torch.equal(actual, wanted), (actual, wanted)


def means_something(op: int, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return op != hvd.Average
    return not dtype.is_complex or op not in (hvd.Min, hvd.Max)


@pytest.mark.np(1, 2, 3)
def test_allreduce_reduces_every_dtype() -> None:
    for dtype, op, shape in itertools.product(EVERYTHING, OPS, [(1,), (7,), (1000,), (17, 33)]):
        terms = [made(rank, shape, dtype) for rank in range(hvd.size())]
        mine = terms[hvd.rank()].clone()
        name = f"{dtype}.{op}.{len(shape)}.{shape[0]}"
        if not means_something(op, dtype):
            with pytest.raises(ValueError, match=op.name):
                hvd.allreduce(mine, name=name, op=op)
            continue
        result = hvd.allreduce(mine, name=name, op=op)
        same(result, expected(op, terms))
        same(mine, terms[hvd.rank()])
        in_place = hvd.allreduce_(mine, name=name, op=op)
        assert in_place is mine
        same(mine, result)


@pytest.mark.np(2, 4)
def test_sixteen_bit_floats_sum_in_float32() -> None:
    n = hvd.size()
    for dtype in (torch.float16, torch.bfloat16):
        big = torch.full((10,), 30000.0, dtype=dtype)
        same(hvd.allreduce(big, op=hvd.Average), big)
        # 2049 isn't a float16; the sum is rounded only once
        small = torch.full((10**6,), 2048.0 if hvd.rank() == 0 else 1.0, dtype=dtype)
        same(hvd.allreduce(small, op=hvd.Sum)[:3], torch.full((3,), 2048.0 + n - 1).to(dtype))
        ones = torch.ones(3, dtype=dtype)
        same(hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5), (0.5 * n * ones).to(dtype))
        same(hvd.allreduce(ones, op=hvd.Sum, postscale_factor=0.25), (0.25 * n * ones).to(dtype))


@pytest.mark.np(2)
def test_scale_factors_truncate_integers() -> None:
    for dtype in INTEGERS[2:]:
        value = torch.tensor([1, 2, 3, 5, 7]).to(dtype)
        pre = hvd.allreduce(value, op=hvd.Sum, prescale_factor=0.5).int()
        assert pre.tolist() == [int(0.5 * v) * 2 for v in (1, 2, 3, 5, 7)]
        post = hvd.allreduce(value, op=hvd.Sum, postscale_factor=0.3).int()
        assert post.tolist() == [int(0.3 * 2 * v) for v in (1, 2, 3, 5, 7)]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda t: t.clone(),
    "transposed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "channels_last": lambda t: t.clone(memory_format=torch.channels_last),
    "strided": lambda t: torch.stack([t, -t], -1)[..., 0],
    "offset": lambda t: torch.cat([-t[:1], t])[1:],
    "flipped": lambda t: t.flip(0).flip(0),
}


@pytest.mark.np(2)
def test_layouts_work_and_may_differ_between_ranks() -> None:
    terms = [made(rank, (4, 3, 5, 6), torch.float32) for rank in range(2)]
    wanted = terms[0] + terms[1]
    for theirs, ours in itertools.product(LAYOUTS, LAYOUTS):
        layout = LAYOUTS[ours if hvd.rank() else theirs]
        mine = layout(terms[hvd.rank()])
        before = mine.clone()
        same(hvd.allreduce(mine, name="layout", op=hvd.Sum), wanted)
        same(mine, before)
        strides = mine.stride()
        assert hvd.allreduce_(mine, name="layout", op=hvd.Sum) is mine
        same(mine, wanted)
        assert mine.stride() == strides
        same(hvd.broadcast_(layout(terms[hvd.rank()]), 1, name="layout"), terms[1])
        same(hvd.allgather(layout(terms[hvd.rank()]), name="layout"), torch.cat(terms))


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


@pytest.mark.np(1, 2)
def test_scalars_and_empty_tensors() -> None:
    n = hvd.size()
    for shape in [(), (0,), (3, 0, 2)]:
        for dtype in EVERYTHING:
            value = torch.ones(shape).to(dtype)
            total = torch.full(shape, n if dtype is not torch.bool else 1).to(dtype)
            same(hvd.allreduce(value, name="small", op=hvd.Sum), total)
            same(hvd.broadcast(value, n - 1, name="small"), value)
            hvd.allreduce_(value, name="small", op=hvd.Sum)
            same(value, total)
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with pytest.raises(ValueError, match="0-d"):
            call(torch.tensor(1.0), name="scalar")
    same(hvd.allgather(torch.ones(0, 3)), torch.ones(0, 3))
    same(hvd.reducescatter(torch.ones(0, 3)), torch.ones(0, 3))
    same(hvd.alltoall(torch.ones(0, 3)), torch.ones(0, 3))


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


@pytest.mark.np(2, 3)
def test_broadcast_from_every_root() -> None:
    for root, dtype in itertools.product(range(hvd.size()), EVERYTHING):
        mine = made(hvd.rank(), (5, 4), dtype)
        kept = mine.clone()
        result = hvd.broadcast(mine, root, name=f"from.{root}")
        same(result, made(root, (5, 4), dtype))
        same(mine, kept)
        assert result is not mine
        assert hvd.broadcast_(mine, root, name=f"from.{root}") is mine
        same(mine, result)


@pytest.mark.np(1, 2, 4)
def test_allgather_of_different_rows() -> None:
    for dtype in EVERYTHING:
        parts = [made(rank, (rank, 5, 2), dtype) for rank in range(hvd.size())]
        same(hvd.allgather(parts[hvd.rank()], name="rows"), torch.cat(parts))
    same(hvd.allgather(torch.ones(0, 5, 2)), torch.ones(0, 5, 2))
    handles = [
        (hvd.allgather_async(torch.full((hvd.rank() + i % 2, 3), i), name=f"many.{i}"), i)
        for i in range(20)
    ]
    for handle, i in reversed(handles):
        rows = sum(rank + i % 2 for rank in range(hvd.size()))
        same(hvd.synchronize(handle), torch.full((rows, 3), i))


@pytest.mark.np(1, 2, 3)
def test_alltoall() -> None:
    n, r = hvd.size(), hvd.rank()
    even = torch.arange(2 * n) + 100 * r
    wanted = torch.cat([torch.arange(2 * r, 2 * r + 2) + 100 * peer for peer in range(n)])
    same(hvd.alltoall(even), wanted)
    output, received = hvd.synchronize(hvd.alltoall_async(even))
    same(output, wanted)
    same(received, torch.full((n,), 2, dtype=torch.int32))

    # Rank s sends s + d rows to rank d; two rows are left over.
    splits = [r + d for d in range(n)]
    for dtype, form in itertools.product(EVERYTHING, (list, torch.tensor)):
        rows = made(r, (sum(splits) + 2, 3), dtype)
        given = splits if form is list else torch.tensor(splits, dtype=torch.int32)
        output, received = hvd.alltoall(rows, given, name="uneven")
        same(received, torch.tensor([peer + r for peer in range(n)], dtype=torch.int32))
        parts = []
        for peer in range(n):
            start = sum(peer + d for d in range(r))
            total = sum(peer + d for d in range(n)) + 2
            parts.append(made(peer, (total, 3), dtype)[start : start + peer + r])
        same(output, torch.cat(parts))
    output, received = hvd.alltoall(torch.ones(3), torch.zeros(n, dtype=torch.int32))
    same(output, torch.ones(0))
    assert received.tolist() == [0] * n


@pytest.mark.np(1, 2, 3)
def test_reducescatter() -> None:
    n, r = hvd.size(), hvd.rank()
    for rows, dtype, op in itertools.product(
        [0, 1, n, 7], FLOATS + INTEGERS, [hvd.Sum, hvd.Average]
    ):
        terms = [made(rank, (rows, 3), dtype) for rank in range(n)]
        share, extra = divmod(rows, n)
        start = r * share + min(r, extra)
        wanted = expected(op, terms)[start : start + share + (r < extra)]
        same(hvd.reducescatter(terms[r], op=op, name="scatter"), wanted)
    with pytest.raises(hvd.HorovodInternalError, match="Average or Sum"):
        hvd.reducescatter(torch.ones(n), op=hvd.Max)


@pytest.mark.np(1, 2)
def test_groups() -> None:
    n, r = hvd.size(), hvd.rank()
    shapes = [(3,), (), (0, 2), (4, 5)]
    dtypes = [torch.float32, torch.float64, torch.int32, torch.float16]
    terms = [[made(k, s, d) for s, d in zip(shapes, dtypes, strict=True)] for k in range(n)]
    wanted = [expected(hvd.Sum, list(each)) for each in zip(*terms, strict=True)]
    results = hvd.grouped_allreduce(terms[r], op=hvd.Sum, name="group")
    assert isinstance(results, list)
    results += hvd.synchronize(hvd.grouped_allreduce_async(terms[r], op=hvd.Sum))
    in_place = hvd.grouped_allreduce_([term.clone() for term in terms[r]], op=hvd.Sum)
    assert isinstance(in_place, tuple)
    for result, want in zip([*results, *in_place], wanted * 3, strict=True):
        same(result, want)
    tensors = [torch.full((r + 1, 2), float(r)), torch.full((2,), r)]
    gathered = hvd.grouped_allgather(tensors, name="group")
    assert isinstance(gathered, tuple)
    same(gathered[0], torch.cat([torch.full((k + 1, 2), float(k)) for k in range(n)]))
    same(gathered[1], torch.cat([torch.full((2,), k) for k in range(n)]))
    scattered = hvd.grouped_reducescatter([torch.ones(n, 2), torch.ones(2 * n)], op=hvd.Sum)
    assert isinstance(scattered, list)
    same(scattered[0], torch.full((1, 2), float(n)))
    same(scattered[1], torch.full((2,), float(n)))
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
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
    same(hvd.synchronize(first), torch.full((3,), 2.0))
    assert hvd.synchronize(first) is None
    assert hvd.synchronize(10**9) is None
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


@pytest.mark.np(2, fresh=True)
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


@pytest.mark.np(2)
def test_join_lets_others_go_on() -> None:
    for round_ in range(3):
        steps = 3 + 2 * (hvd.rank() == (round_ + 1) % 2)
        for step in range(steps):
            alone = step >= 3
            one = torch.ones(4)
            same(hvd.allreduce(one, name=f"step.{step % 2}"), one * (0.5 if alone else 1))
            half = torch.ones(4, dtype=torch.float16)
            same(hvd.allreduce(one, op=hvd.Sum), one * (1 if alone else 2))
            results = hvd.grouped_allreduce([half, one], name=f"pair.{step % 2}", op=hvd.Sum)
            same(results[0], half * (1 if alone else 2))
            same(results[1], one * (1 if alone else 2))
        assert hvd.join() == (round_ + 1) % 2
        same(hvd.allreduce(torch.ones(4), op=hvd.Sum), torch.full((4,), 2.0))


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
def test_ten_thousand_operations_leak_nothing() -> None:
    def resident_kib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    value = torch.ones(64)

    def work(times: int) -> None:
        for _ in range(times):
            hvd.synchronize(hvd.allreduce_async_(value, name="again", op=hvd.Max))
            hvd.synchronize(hvd.allgather_async(value[:2], name="again"))

    work(3000)
    before = resident_kib()
    work(10_000)
    assert resident_kib() - before < 1024
