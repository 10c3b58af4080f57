"""Every collective x form x data type x memory format, bit for bit as plain torch computes it.

Each rank makes the tensors of all ranks from seeds, so it knows what must come out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import horovod.torch as hvd

INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
EVERYTHING = [*INTEGERS, *FLOATS, torch.bool, *COMPLEX]
OPS = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]


# -------------------------------------------------------------------------------------------------
# What goes in


def made(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> torch.Tensor:
    """Integers from their whole range, so that sums wrap; floats that round in every operation."""
    generator = torch.Generator().manual_seed(hash(seed))
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype.is_complex or dtype.is_floating_point:
        real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        made = torch.randn((*shape, 2), dtype=real, generator=generator)
        return torch.view_as_complex(made) if dtype.is_complex else made[..., 0].to(dtype)
    return torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=generator).to(dtype)


class Layout(NamedTuple):
    shape: tuple[int, ...]
    arrange: Callable[[torch.Tensor], torch.Tensor]
    """Gives a row-major tensor this layout."""


BOX = (4, 3, 2, 5)
LAYOUTS = {
    "row-major": Layout(BOX, lambda t: t),
    "transposed": Layout(BOX, lambda t: t.mT.contiguous().mT),
    "channels_last": Layout(BOX, lambda t: t.clone(memory_format=torch.channels_last)),
    "strided": Layout(BOX, lambda t: torch.stack([t, t.roll(1)], -1)[..., 0]),
    "offset": Layout(BOX, lambda t: torch.cat([t.roll(1)[:1], t])[1:]),
    "column": Layout(BOX, lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)),
    "expanded": Layout(BOX, lambda t: t[:1].expand(BOX)),
    "long": Layout((1003,), lambda t: t),
    "empty": Layout((0,), lambda t: t),
    "nothing in the middle": Layout((3, 0, 2), lambda t: t),
    "0-d": Layout((), lambda t: t),
}
ROWS = [name for name in LAYOUTS if name != "0-d"]
WRITABLE = [name for name in LAYOUTS if name != "expanded"]


@functools.cache
def terms(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """By rank, what goes in for a layout, in row-major order."""
    shape, arrange = LAYOUTS[name]
    seed = list(LAYOUTS).index(name)
    return [arrange(made(shape, dtype, seed, r)).contiguous() for r in range(hvd.size())]


def inputs(names: Sequence[str], dtype: torch.dtype, shift: int) -> list[torch.Tensor]:
    """This rank's tensors; the ranks arrange those of BOX differently unless `shift` is 0."""
    boxes = [name for name in WRITABLE if LAYOUTS[name].shape == BOX]
    tensors = []
    for name in names:
        arrange = LAYOUTS[name].arrange
        if name in boxes:
            place = boxes.index(name) + shift * hvd.rank()
            arrange = LAYOUTS[boxes[place % len(boxes)]].arrange
        tensors.append(arrange(terms(name, dtype)[hvd.rank()].clone()))
    return tensors


# -------------------------------------------------------------------------------------------------
# What must come out


def scaled(value: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Floats times the factor in their own type; integers in float64, truncated toward zero."""
    if factor == 1.0:
        return value
    if dtype.is_floating_point or dtype.is_complex:
        return value * torch.tensor(factor, dtype=value.dtype)
    return (value.double() * factor).trunc().to(dtype).long()


def reduced(
    terms: Sequence[torch.Tensor], op: int, before: float = 1.0, after: float = 1.0
) -> torch.Tensor:
    """The left fold in rank order: 16-bit floats in float32, integers modulo 2^bits."""
    dtype, n = terms[0].dtype, len(terms)
    if dtype.is_complex:
        if op == hvd.Product:
            real, imaginary = terms[0].real, terms[0].imag
            for term in terms[1:]:  # torch's own product may fuse a multiplication and an addition
                real, imaginary = (
                    real * term.real - imaginary * term.imag,
                    real * term.imag + imaginary * term.real,
                )
            return torch.complex(real, imaginary)
        parts = [torch.view_as_real(term) for term in terms]
        return torch.view_as_complex(reduced(parts, op, before, after))
    fold = {
        hvd.Sum: torch.add,
        hvd.Average: torch.add,
        hvd.Min: torch.minimum,
        hvd.Max: torch.maximum,
        hvd.Product: torch.mul,
    }[op]
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    if not dtype.is_floating_point:
        wide = torch.int64
    result = scaled(terms[0].to(wide), before, dtype)
    for term in terms[1:]:
        result = fold(result, scaled(term.to(wide), before, dtype))
    if dtype is torch.bool:
        return result != 0
    if dtype.is_floating_point:
        return scaled(result, after / n if op == hvd.Average else after, dtype).to(dtype)
    result = result.to(dtype).long()
    if op == hvd.Average:
        result = torch.div(result, n, rounding_mode="trunc")
    return scaled(result, after, dtype).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def same(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), what
    assert torch.equal(bits(actual), bits(wanted)), (what, actual, wanted)


# -------------------------------------------------------------------------------------------------
# The forms: each takes several tensors and gives as many results

Form = Callable[[list[torch.Tensor], dict[str, Any]], Sequence[Any]]


def each(call: Callable[..., Any]) -> Form:
    return lambda tensors, options: [
        call(tensor, name=f"each.{i}", **options) for i, tensor in enumerate(tensors)
    ]


def later(call: Callable[..., int]) -> Form:
    """All are in flight at once, and are waited for in another order."""

    def run(tensors: list[torch.Tensor], options: dict[str, Any]) -> list[Any]:
        handles = [call(tensor, name=f"later.{i}", **options) for i, tensor in enumerate(tensors)]
        return [hvd.synchronize(handle) for handle in reversed(handles)][::-1]

    return run


def group(call: Callable[..., Sequence[torch.Tensor]]) -> Form:
    return lambda tensors, options: call(tensors, name="group", **options)


def group_later(call: Callable[..., int]) -> Form:
    return lambda tensors, options: hvd.synchronize(call(iter(tensors), name="later", **options))


NEW: dict[str, list[Form]] = {
    "allreduce": [
        each(hvd.allreduce),
        later(hvd.allreduce_async),
        group(hvd.grouped_allreduce),
        group_later(hvd.grouped_allreduce_async),
    ],
    "allgather": [
        each(hvd.allgather),
        later(hvd.allgather_async),
        group(hvd.grouped_allgather),
        group_later(hvd.grouped_allgather_async),
    ],
    "broadcast": [each(hvd.broadcast), later(hvd.broadcast_async)],
    "reducescatter": [
        each(hvd.reducescatter),
        later(hvd.reducescatter_async),
        group(hvd.grouped_reducescatter),
        group_later(hvd.grouped_reducescatter_async),
    ],
}
IN_PLACE: dict[str, list[Form]] = {
    "allreduce": [
        each(hvd.allreduce_),
        later(hvd.allreduce_async_),
        group(hvd.grouped_allreduce_),
        group_later(hvd.grouped_allreduce_async_),
    ],
    "broadcast": [each(hvd.broadcast_), later(hvd.broadcast_async_)],
}


Law = Callable[[list[torch.Tensor]], torch.Tensor]
"""Makes this rank's result from the terms of all."""


def check(
    call: str,
    names: Sequence[str],
    dtype: torch.dtype,
    law: Law,
    turn: int | None = None,
    /,
    **options: Any,
) -> None:
    """The forms of a collective, with one tensor of each layout; only one form if it has a turn."""
    forms = [(form, False) for form in NEW[call]]
    forms += [(form, True) for form in IN_PLACE.get(call, [])]
    wanted = {name: law(terms(name, dtype)) for name in names}
    for number, (form, in_place) in enumerate(forms):
        if turn is not None and number != turn % len(forms):
            continue
        given = WRITABLE if in_place else names
        mine = inputs(given, dtype, shift=number)
        before = [(tensor.stride(), bits(tensor)) for tensor in mine]
        results = form(mine, options)
        for name, tensor, (stride, old), result in zip(given, mine, before, results, strict=True):
            same(result, wanted[name], f"{call}, form {number}, {name}, {options}")
            assert (result is tensor) == in_place
            assert tensor.stride() == stride
            assert in_place or torch.equal(bits(tensor), old)


def defined(op: int, dtype: torch.dtype, factors: bool) -> bool:
    if dtype is torch.bool:
        return op != hvd.Average and not factors
    return not dtype.is_complex or op not in (hvd.Min, hvd.Max)


# -------------------------------------------------------------------------------------------------
# The laws

SIZES = pytest.mark.np(1, 2, 3, 4)


def check_reduction(call: str, names: Sequence[str], part: Law, ops: Sequence[int]) -> None:
    """`part` takes this rank's part of the reduced tensor.

    Every operation meets every data type; Sum and Average in every form, the others in one each.
    """
    for (i, dtype), op in itertools.product(enumerate(EVERYTHING), ops):
        sums = op in (hvd.Sum, hvd.Average)
        for before, after in [(1.0, 1.0), (0.3, 0.7)] if sums else [(1.0, 1.0)]:
            options = {"op": op, "prescale_factor": before, "postscale_factor": after}
            if defined(op, dtype, before != 1.0):
                law = lambda terms: part(reduced(terms, op, before, after))  # noqa: B023, E731
                turn = None if sums and before == 1.0 else i + int(op)
                check(call, names, dtype, law, turn, **options)
            else:
                with pytest.raises(ValueError, match=r"defined for bool|defined for complex"):
                    getattr(hvd, call)(made(BOX, dtype), name="undefined", **options)


@SIZES
def test_allreduce() -> None:
    check_reduction("allreduce", list(LAYOUTS), lambda total: total, OPS)


@SIZES
def test_reducescatter() -> None:
    def share(total: torch.Tensor) -> torch.Tensor:
        return total.tensor_split(hvd.size())[hvd.rank()]

    check_reduction("reducescatter", ROWS, share, [hvd.Sum, hvd.Average])


@SIZES
def test_broadcast() -> None:
    for dtype, root in itertools.product(EVERYTHING, range(hvd.size())):
        check("broadcast", list(LAYOUTS), dtype, lambda terms: terms[root], root_rank=root)  # noqa: B023


@SIZES
def test_allgather() -> None:
    for dtype in EVERYTHING:
        check("allgather", ROWS, dtype, torch.cat)


@SIZES
def test_allgather_of_different_rows() -> None:
    def rows(rank: int) -> int:  # none from rank 0
        return 3 * rank % 5

    boxes = [name for name in ROWS if LAYOUTS[name].shape == BOX]
    for dtype, form in itertools.product(EVERYTHING, NEW["allgather"]):
        mine = [tensor[: rows(hvd.rank())] for tensor in inputs(boxes, dtype, 1)]
        for name, result in zip(boxes, form(mine, {}), strict=True):
            parts = [term[: rows(rank)] for rank, term in enumerate(terms(name, dtype))]
            same(result, torch.cat(parts), name)


def cuts(rows: int, sender: int) -> list[int]:
    """Where a rank cuts its rows for the others; what comes after the last cut isn't sent."""
    generator = torch.Generator().manual_seed(sender)
    inner = torch.randint(rows + 1, (hvd.size(),), generator=generator)
    return [0, *inner.sort().values.tolist()]


@SIZES
def test_alltoall() -> None:
    n, r = hvd.size(), hvd.rank()

    def splits(tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(cuts(len(tensor), r)).diff().int()

    forms = [
        each(lambda tensor, name: hvd.alltoall(tensor, splits(tensor), name)),
        later(lambda tensor, name: hvd.alltoall_async(tensor, splits(tensor).tolist(), name)),
    ]
    for dtype, form in itertools.product(EVERYTHING, forms):
        for name, (result, received) in zip(ROWS, form(inputs(ROWS, dtype, 1), {}), strict=True):
            parts = []
            for sender, term in enumerate(terms(name, dtype)):
                points = cuts(len(term), sender)
                parts.append(term[points[r] : points[r + 1]])
            same(result, torch.cat(parts), name)
            same(received, torch.tensor([len(part) for part in parts], dtype=torch.int32), name)
    even = torch.arange(2 * n) + 100 * r
    wanted = torch.cat([torch.arange(2 * r, 2 * r + 2) + 100 * sender for sender in range(n)])
    same(hvd.alltoall(even), wanted, "no splits")
    output, received = hvd.synchronize(hvd.alltoall_async(even))
    same(output, wanted, "no splits")
    same(received, torch.full((n,), 2, dtype=torch.int32), "no splits")


@SIZES
def test_a_scalar_has_no_rows() -> None:
    scalar = torch.tensor(1.0)
    alltoall = [each(hvd.alltoall), later(hvd.alltoall_async)]
    for form in [*NEW["allgather"], *NEW["reducescatter"], *alltoall]:
        with pytest.raises(ValueError, match="0-d"):
            form([scalar], {})
        assert hvd.allreduce(scalar, op=hvd.Sum, name="after") == hvd.size()


@pytest.mark.np(2, 3, 4)
def test_sixteen_bit_floats_round_once() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype, op, count in itertools.product(HALVES, OPS, [1, 7, 1000, 10**6]):
        values = [made((count,), dtype, rank) for rank in range(n)]
        same(hvd.allreduce(values[r], op=op, name="half"), reduced(values, op), f"{op} {count}")
    for dtype, compression in zip(
        HALVES, (hvd.Compression.fp16, hvd.Compression.bf16), strict=True
    ):
        big = torch.full((10,), 30000.0, dtype=dtype)
        same(hvd.allreduce(big), big, "the sum is more than a float16 holds")
        same(hvd.allreduce(big.float(), compression=compression), big.float(), "compressed")
        whole = torch.full((10,), r)
        total = torch.full((10,), n * (n - 1) // 2)
        same(hvd.allreduce(whole, op=hvd.Sum, compression=compression), total, "not compressed")


@SIZES
def test_special_floats() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype, op in itertools.product(FLOATS, OPS):
        limits = torch.finfo(dtype)
        special = [float("nan"), float("inf"), -float("inf"), 0.0, -1.0, limits.tiny, limits.max]
        values = torch.cartesian_prod(*[torch.tensor(special, dtype=dtype)] * n).reshape(-1, n).T
        result = hvd.allreduce(values[r], op=op, name="special")
        wanted = reduced(list(values), op)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
