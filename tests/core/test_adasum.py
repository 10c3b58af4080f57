"""Adasum over engines wired as threads: its laws, and results against NumPy.

The reference merges vectors as the definition says, in float64, and stores every merged one; the
engine never does. Knows no launcher and no framework.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from horovod import _core

from .engines import (
    ADASUM,
    ALLREDUCE,
    DTYPES,
    REDUCESCATTER,
    SUM,
    Failed,
    Rank,
    default_plan,
    engines,
    run,
)

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]

SIZES = [1, 2, 3, 4, 5, 7]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
MISMATCH = 2
# Slots wrap, room runs out, and a chunk takes many segments.
TINY = {"segment_bytes": 256, "outbox_bytes": 8192, "direct_bytes": 512}
ACCURACY = 1e-12

# -------------------------------------------------------------------------------------------------
# The reference


def merge(a: Doubles, wa: int, b: Doubles, wb: int) -> Doubles:
    tiny = np.sqrt(np.finfo(np.float64).tiny)
    dot, aa, bb = a @ b, a @ a, b @ b
    of_a = 1.0 if aa < tiny else 1 - wa / (wa + wb) * dot / aa
    of_b = 1.0 if bb < tiny else 1 - wb / (wa + wb) * dot / bb
    return of_a * a + of_b * b


def adasum(vectors: list[Doubles]) -> Doubles:
    level = [(vector, 1) for vector in vectors]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        merged = [(merge(a, wa, b, wb), wa + wb) for (a, wa), (b, wb) in pairs]
        level = merged + (level[-1:] if len(level) % 2 else [])
    return level[0][0]


def widen(x: Array, dtype: str) -> Doubles:
    if dtype == "bfloat16":
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def narrow(x: Array, dtype: str) -> Array:
    """As the type's storage; bfloat16 is held in uint16, rounded from float32."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# Bits of the significand, exponent of the least normal number.
FORMATS = {
    "float16": (11, -14),
    "bfloat16": (8, -126),
    "float32": (24, -126),
    "float64": (53, -1022),
}


def assert_rounded(got: Array, want: Doubles, dtype: str, scale: Doubles | float) -> None:
    """`got` is `want` rounded once; `want` is known to 1e-12 of `scale`."""
    bits, least = FORMATS[dtype]
    exponent = np.maximum(np.frexp(want)[1] - 1, least)
    half_ulp = np.ldexp(0.5, exponent - bits + 1)
    error = np.abs(widen(got, dtype) - want)
    allowed = half_ulp * (dtype != "float64") + ACCURACY * scale
    wrong = np.flatnonzero(~(error <= allowed))
    assert wrong.size == 0, (dtype, wrong[:5], widen(got, dtype)[wrong[:5]], want[wrong[:5]])


# -------------------------------------------------------------------------------------------------
# Worlds


@pytest.fixture(scope="module", params=SIZES)
def world(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    with engines(request.param, TINY) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[list[Rank]]:
    with engines(3) as ranks:
        yield ranks


def reduce_in(
    ranks: list[Rank], inputs: list[Array], dtype: str = "float64", **options: Any
) -> Array:
    """The result, which is the same on all ranks bit for bit."""

    def body(rank: Rank) -> Array:
        x = inputs[rank.rank].copy()
        out = rank.allreduce("x", x, op=ADASUM, dtypes=[DTYPES[dtype]], **options)
        assert x.tobytes() == inputs[rank.rank].tobytes()
        return out

    results = run(ranks, body)
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


def draw(n: int, count: int, dtype: str, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng([n, count, seed])
    common = rng.normal(0, 1, count)  # so that dot products matter
    return [narrow(common + rng.normal(0, 1, count), dtype) for _ in range(n)]


# -------------------------------------------------------------------------------------------------
# The laws


def test_results_are_the_definition_rounded_once(world: list[Rank]) -> None:
    """Every dtype x count x kind of output, all in flight and so in part fused."""
    n = len(world)
    cases = [
        (dtype, count, in_place, draw(n, count, dtype))
        for dtype in FLOATS
        for count in sorted({0, 1, n - 1, n, 97, 1009, 3001})
        for in_place in [False, True]
    ]

    def body(rank: Rank) -> list[Array]:
        calls = []
        for i, (dtype, _, in_place, inputs) in enumerate(cases):
            x = inputs[rank.rank].copy()
            out = x if in_place else np.empty_like(x)
            handle = rank.submit(
                ALLREDUCE, f"case.{i}", [x], [out], op=ADASUM, dtypes=[DTYPES[dtype]]
            )
            calls.append((handle, out))
        for handle, _ in calls:
            rank.finish(handle)
        return [out for _, out in calls]

    results = run(world, body)
    for i, (dtype, _, in_place, inputs) in enumerate(cases):
        outs = [result[i].tobytes() for result in results]
        assert len(set(outs)) == 1
        if in_place:
            assert outs[0] == results[0][i - 1].tobytes()
        vectors = [widen(x, dtype) for x in inputs]
        scale = max((np.abs(v).max() for v in vectors if v.size), default=0.0)
        assert_rounded(results[0][i], adasum(vectors), dtype, scale)


def test_parallel_vectors_are_averaged(world: list[Rank]) -> None:
    n = len(world)
    direction = np.random.default_rng(n).normal(0, 1, 501)
    for scales in [np.arange(1.0, n + 1), (-1.5) ** np.arange(n), np.ones(n)]:
        got = reduce_in(world, [s * direction for s in scales])
        want = scales.mean() * direction
        assert np.abs(got - want).max() <= ACCURACY * np.abs(scales).max() * np.abs(direction).max()


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_vectors_stay_as_they_are(world: list[Rank], dtype: str) -> None:
    x = draw(1, 301, dtype)[0]
    got = reduce_in(world, [x] * len(world), dtype)
    if dtype == "float64":
        np.testing.assert_allclose(got, x, rtol=ACCURACY, atol=0)
    else:
        assert got.tobytes() == x.tobytes()


def test_orthogonal_vectors_are_added(world: list[Rank]) -> None:
    n = len(world)
    rng = np.random.default_rng(n)
    rotated = np.linalg.qr(rng.normal(0, 1, (40, 40)))[0][:n] * rng.uniform(0.5, 2, (n, 1))
    disjoint = np.where(np.arange(40) % n == np.arange(n)[:, None], rng.normal(0, 1, 40), 0)
    for vectors in [rotated, disjoint]:
        got = reduce_in(world, list(vectors))
        np.testing.assert_allclose(got, vectors.sum(0), rtol=0, atol=ACCURACY)


def test_zero_vectors_change_nothing(world: list[Rank]) -> None:
    n = len(world)
    x = draw(1, 50, "float64")[0]
    for only in range(n):
        got = reduce_in(world, [x if r == only else 0 * x for r in range(n)])
        assert (got == x).all()
    assert (reduce_in(world, [0 * x] * n) == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_scales_may_differ_by_any_factor(world: list[Rank], dtype: str) -> None:
    n = len(world)
    span = 4 if dtype == "float16" else 30
    scales = 10.0 ** np.linspace(-span, span, n)
    inputs = [
        narrow(widen(x, dtype) * s, dtype) for x, s in zip(draw(n, 203, dtype), scales, strict=True)
    ]
    vectors = [widen(x, dtype) for x in inputs]
    scale = max(np.abs(v).max() for v in vectors)
    assert_rounded(reduce_in(world, inputs, dtype), adasum(vectors), dtype, scale)


@pytest.mark.parametrize(
    ("dtype", "largest", "least"),
    [("float16", 65504.0, 2.0**-24), ("bfloat16", 3.38e38, 2.0**-133), ("float32", 3.4e38, 1e-45)],
)
def test_the_ends_of_a_type_s_range(
    world: list[Rank], dtype: str, largest: float, least: float
) -> None:
    n = len(world)
    signs = np.where(np.arange(96) % 2, 1.0, -1.0)
    for magnitude in [largest, least]:
        one = narrow(magnitude * signs, dtype)
        assert reduce_in(world, [one] * n, dtype).tobytes() == one.tobytes()
        apart = [np.where(np.arange(96) % n == r, one, 0).astype(one.dtype) for r in range(n)]
        assert reduce_in(world, apart, dtype).tobytes() == one.tobytes()
    # The first pair merges to more than the type can hold; the others bring it back.
    x, y = 0.6 * largest * np.array([[1.0, 1.0, 0], [1.0, -1.0, 0]])
    inputs = [narrow(v, dtype) for v in [x, y, -x, -y, x, -x, y][:n]]
    want = adasum([widen(v, dtype) for v in inputs])
    if n > 2:
        assert np.abs(want).max() < largest
        assert_rounded(reduce_in(world, inputs, dtype), want, dtype, largest)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_seen_by_all(world: list[Rank], dtype: str) -> None:
    for bad in [np.nan, np.inf, -np.inf]:
        inputs = [widen(x, dtype) for x in draw(len(world), 301, dtype)]
        inputs[-1][7] = bad
        got = widen(reduce_in(world, [narrow(x, dtype) for x in inputs], dtype), dtype)
        assert not np.isfinite(got[7])
        assert len(world) == 1 or np.isnan(got).all()


def test_prescale_comes_before_and_postscale_after(world: list[Rank]) -> None:
    for dtype in FLOATS:
        inputs = draw(len(world), 333, dtype)
        got = reduce_in(world, inputs, dtype, prescale=0.3, postscale=1.7)
        want = 1.7 * adasum([0.3 * widen(x, dtype) for x in inputs])
        assert_rounded(got, want, dtype, 8)


# -------------------------------------------------------------------------------------------------
# The same bits


def test_company_changes_nothing(world: list[Rank]) -> None:
    """Alone, in a group, and fused with others."""
    shapes: list[tuple[int, ...]] = [(5,), (700,), (), (0,), (2, 3), (2049,), (1,)]
    tensors = [
        (dtype, [x.reshape(shape) for x in draw(len(world), int(np.prod(shape)), dtype, i)])
        for i, (dtype, shape) in enumerate(zip(FLOATS + FLOATS[:3], shapes, strict=True))
    ]
    dtypes = [DTYPES[dtype] for dtype, _ in tensors]

    def body(rank: Rank) -> None:
        mine = [inputs[rank.rank] for _, inputs in tensors]
        alone = [
            rank.allreduce(f"alone.{i}", x, op=ADASUM, dtypes=[dtypes[i]])
            for i, x in enumerate(mine)
        ]
        grouped = [np.empty_like(x) for x in mine]
        rank.call(ALLREDUCE, "group", mine, grouped, op=ADASUM, dtypes=dtypes)
        fused = [np.empty_like(x) for x in mine]
        handles = [
            rank.submit(ALLREDUCE, f"fused.{i}", [x], [out], op=ADASUM, dtypes=[dtypes[i]])
            for i, (x, out) in enumerate(zip(mine, fused, strict=True))
        ]
        for handle in handles:
            rank.finish(handle)
        for one, two, three in zip(alone, grouped, fused, strict=True):
            assert one.tobytes() == two.tobytes() == three.tobytes()

    run(world, body)


def test_the_plan_and_the_processor_change_nothing() -> None:
    counts = dict.fromkeys(FLOATS, 5003) | {"float32": 200_003}  # that is more than one block
    inputs = {dtype: draw(3, count, dtype) for dtype, count in counts.items()}
    results: dict[str, set[bytes]] = {dtype: set() for dtype in FLOATS}
    worlds = [(default_plan(), simd) for simd in _core.simd_available()]
    for plan, simd in [*worlds, (default_plan(segment_bytes=1 << 14), "auto")]:
        with engines(3, plan, {"simd": simd}) as ranks:
            for dtype in FLOATS:
                results[dtype].add(reduce_in(ranks, inputs[dtype], dtype).tobytes())
    assert {dtype: len(bits) for dtype, bits in results.items()} == dict.fromkeys(FLOATS, 1)
    for dtype in FLOATS:
        got = np.frombuffer(results[dtype].pop(), inputs[dtype][0].dtype)
        assert_rounded(got, adasum([widen(x, dtype) for x in inputs[dtype]]), dtype, 8)


# -------------------------------------------------------------------------------------------------
# Who takes part


def test_between_sums_and_in_overlapping_process_sets(three: list[Rank]) -> None:
    inputs = draw(3, 1000, "float32")

    def body(rank: Rank) -> list[Array | None]:
        low, high = rank.add_set([0, 1]), rank.add_set([1, 2])
        x = inputs[rank.rank]
        outs: list[Array | None] = [np.empty_like(x) for _ in range(4)]
        handles = []
        for i, (op, set_id, members) in enumerate(
            [
                (ADASUM, low, [0, 1]),
                (SUM, 0, [0, 1, 2]),
                (ADASUM, high, [1, 2]),
                (ADASUM, 0, [0, 1, 2]),
            ]
        ):
            if rank.rank in members:
                handles.append(
                    rank.submit(ALLREDUCE, f"x.{i}", [x], [outs[i]], op=op, set_id=set_id)
                )
            else:
                outs[i] = None
        for handle in handles:
            rank.finish(handle)
        rank.remove_set(low)
        rank.remove_set(high)
        return outs

    results = run(three, body)
    vectors = [x.astype(np.float64) for x in inputs]
    for i, members in [(0, [0, 1]), (2, [1, 2]), (3, [0, 1, 2])]:
        want = adasum([vectors[r] for r in members])
        for r in members:
            assert_rounded(results[r][i], want, "float32", 8)
    assert results[0][1].tobytes() == functools.reduce(np.add, inputs).tobytes()


def test_ranks_that_joined_are_left_out(three: list[Rank]) -> None:
    inputs = draw(3, 1000, "float64")

    def body(rank: Rank) -> Array | None:
        out = None
        if rank.rank != 1:
            out = rank.allreduce("x", inputs[rank.rank], op=ADASUM)
        rank.join()
        return out

    first, _, last = run(three, body)
    assert first.tobytes() == last.tobytes()
    assert_rounded(first, adasum([inputs[0], inputs[2]]), "float64", 8)


REFUSED = sorted(DTYPES.keys() - FLOATS)


@pytest.mark.parametrize("dtype", REFUSED)
def test_only_floats_have_an_adasum(three: list[Rank], dtype: str) -> None:
    assert_refused(three, lambda rank: rank.submit(ALLREDUCE, "x", [np.ones(4, dtype)], op=ADASUM))


def test_adasum_is_not_scattered(three: list[Rank]) -> None:
    assert_refused(three, lambda rank: rank.submit(REDUCESCATTER, "x", [np.ones(6)], op=ADASUM))


def assert_refused(ranks: list[Rank], submit: Callable[[Rank], int]) -> None:
    """At the call, before anything is sent; whoever made a matching call learns of it."""

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(ValueError, match="Adasum"):
                submit(rank)
        else:
            with pytest.raises(Failed, match="Adasum") as error:
                rank.allreduce("x", np.ones(4), op=ADASUM)
            assert error.value.kind == MISMATCH

    run(ranks, body)
