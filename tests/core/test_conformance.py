"""Every collective over transport x dtype x op x count x size, bit for bit against NumPy.

The reference states the law of docs and kernels.h: a left fold in rank order; 16-bit floats in fp32
with one rounding; integers wrap and divide exactly, truncating; factors as single multiplications.
Knows engines wired as threads, no launcher and no framework.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from .engines import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    AVERAGE,
    BARRIER,
    BROADCAST,
    DTYPES,
    MAX,
    MIN,
    PRODUCT,
    REDUCESCATTER,
    SUM,
    Rank,
    engines,
    run,
)

Array = npt.NDArray[Any]

# A new transport adds its row: how ranks that only use it are wired.
TRANSPORTS = {"shm": engines}
SIZES = [1, 2, 3, 4, 5]


@dataclass(frozen=True)
class Setup:
    """What shapes slots and schedules."""

    segment_bytes: int
    outbox_bytes: int
    direct_bytes: int
    simd: str

    @property
    def plan(self) -> dict[str, int]:
        return {
            "segment_bytes": self.segment_bytes,
            "outbox_bytes": self.outbox_bytes,
            "direct_bytes": self.direct_bytes,
        }


SETUPS = {
    "tiny": Setup(256, 4096, 512, "auto"),  # slots wrap, room runs out, many segments
    "tiny-baseline": Setup(256, 4096, 0, "baseline"),  # and never direct
    "usual": Setup(1 << 20, 8 << 20, 16 << 10, "auto"),
}

# -------------------------------------------------------------------------------------------------
# The reference


@dataclass(frozen=True)
class Type:
    """A dtype and what NumPy lacks about it. bfloat16 is held in uint16."""

    name: str
    storage: str
    kind: str  # integer, float, bool or complex

    @property
    def ops(self) -> list[int]:
        if self.kind == "complex":
            return [SUM, AVERAGE, PRODUCT]
        if self.kind == "bool":
            return [SUM, PRODUCT, MIN, MAX]
        return [SUM, AVERAGE, PRODUCT, MIN, MAX]

    @property
    def size(self) -> int:
        return np.dtype(self.storage).itemsize

    def widen(self, x: Array) -> Array:
        """As the type that folds compute in."""
        if self.name == "bfloat16":
            return (x.astype(np.uint32) << 16).view(np.float32)
        return x.astype(np.float32) if self.name == "float16" else x

    def narrow(self, x: Array) -> Array:
        if self.name == "bfloat16":  # to nearest, ties to even
            bits = x.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return x.astype(self.storage)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], small: bool) -> Array:
        """Any bits for integers, unless `small`: then sums stay in range, scaled ones too."""
        if self.kind == "bool":
            return rng.integers(0, 2, shape).astype(np.bool_)
        if self.kind == "integer":
            info = np.iinfo(self.storage)
            low, high = (max(info.min, -10), 10) if small else (info.min, info.max)
            return rng.integers(low, high, shape, dtype=self.storage, endpoint=True)
        if self.kind == "complex":
            real = np.float32 if self.name == "complex64" else np.float64
            parts = rng.normal(0, 4, (*shape, 2)).astype(real)
            return parts.view(self.storage)[..., 0]
        x = rng.normal(0, 4, shape)
        return self.narrow(x.astype(np.float64 if self.name == "float64" else np.float32))


TYPES = {
    t.name: t
    for t in [
        Type("uint8", "u1", "integer"),
        Type("int8", "i1", "integer"),
        Type("uint16", "u2", "integer"),
        Type("int16", "i2", "integer"),
        Type("int32", "i4", "integer"),
        Type("int64", "i8", "integer"),
        Type("float16", "f2", "float"),
        Type("float32", "f4", "float"),
        Type("float64", "f8", "float"),
        Type("bool", "?", "bool"),
        Type("bfloat16", "u2", "float"),
        Type("complex64", "c8", "complex"),
        Type("complex128", "c16", "complex"),
    ]
}
assert TYPES.keys() == DTYPES.keys()


def complex_product(a: Array, b: Array) -> Array:
    """By its definition: NumPy's own may use fused multiply-adds."""
    out = np.empty_like(a)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    return out


def combine(t: Type, op: int) -> Callable[[Array, Array], Array]:
    if t.kind == "bool":
        return np.logical_or if op in (SUM, MAX) else np.logical_and
    if op == PRODUCT:
        return complex_product if t.kind == "complex" else np.multiply
    return {SUM: np.add, AVERAGE: np.add, MIN: np.minimum, MAX: np.maximum}[op]


def times(x: Array, factor: float) -> Array:
    """`x * factor` in the precision of `x`, complex numbers by their parts."""
    if factor == 1.0:
        return x
    if not np.iscomplexobj(x):
        return x * x.dtype.type(factor)
    return (x.view(x.real.dtype) * x.real.dtype.type(factor)).view(x.dtype)


def truncated(x: Array, factor: float) -> Array:
    return x if factor == 1.0 else np.trunc(x.astype(np.float64) * factor).astype(x.dtype)


def reduced(t: Type, op: int, terms: list[Array], prescale: float, postscale: float) -> Array:
    divisor = len(terms) if op == AVERAGE else 1
    fold = functools.partial(functools.reduce, combine(t, op))
    with np.errstate(over="ignore", invalid="ignore"):
        if t.kind == "bool":
            return fold(terms)
        if t.kind == "integer":
            total = fold([truncated(x, prescale) for x in terms])
            quotient = total // divisor  # floors; truncation rounds negative ones up
            quotient += ((total % divisor != 0) & (total < 0)).astype(total.dtype)
            return truncated(quotient, postscale)
        total = fold([times(t.widen(x), prescale) for x in terms])
        return t.narrow(times(total, postscale / divisor))


# -------------------------------------------------------------------------------------------------
# Cases


@dataclass
class Case:
    """One call on all ranks and what must come of it."""

    kind: int
    types: list[Type]
    inputs: list[list[Array]]  # by rank and tensor
    expected: list[list[Array]]
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: list[list[int] | None] = field(default_factory=list)  # by rank
    received: list[list[int]] = field(default_factory=list)
    outputs: str = "given"  # or "in place", or "allocated"

    def __str__(self) -> str:
        names = [t.name for t in self.types]
        shapes = [[x.shape for x in tensors] for tensors in self.inputs]
        return (
            f"kind {self.kind}, op {self.op}, {names}, shapes {shapes}, "
            f"scales {self.prescale} and {self.postscale}, root {self.root}, "
            f"splits {self.splits}, outputs {self.outputs}"
        )


def counts_of(t: Type, n: int, segment_bytes: int) -> list[int]:
    """Elements: none, one, around the number of ranks, a prime, several segments and a bit."""
    largest = min(segment_bytes, 4096) * 3 // t.size + 5
    return sorted({0, 1, n - 1, n, 97, largest})


def allreduce(
    rng: np.random.Generator,
    n: int,
    types: list[Type],
    op: int,
    shapes: list[tuple[int, ...]],
    outputs: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Case:
    small = (prescale, postscale) != (1.0, 1.0)
    inputs = [[t.draw(rng, s, small) for t, s in zip(types, shapes, strict=True)] for _ in range(n)]
    results = [
        reduced(t, op, [inputs[r][i] for r in range(n)], prescale, postscale)
        for i, t in enumerate(types)
    ]
    return Case(
        ALLREDUCE,
        types,
        inputs,
        [results] * n,
        op=op,
        prescale=prescale,
        postscale=postscale,
        outputs=outputs,
    )


def reducescatter(rng: np.random.Generator, whole: Case) -> Case:
    """The allreduce's result, its rows dealt out: the first ranks get what is left over."""
    n = len(whole.inputs)
    parts = [np.array_split(x, n) for x in whole.expected[0]]
    return Case(
        REDUCESCATTER,
        whole.types,
        whole.inputs,
        [[part[r] for part in parts] for r in range(n)],
        op=whole.op,
        prescale=whole.prescale,
        postscale=whole.postscale,
        outputs="given" if whole.types[0].name == "bfloat16" else str(rng.choice(OUTPUTS)),
    )


def broadcast(
    rng: np.random.Generator,
    n: int,
    types: list[Type],
    shapes: list[tuple[int, ...]],
    root: int,
    outputs: str,
) -> Case:
    inputs = [[t.draw(rng, s, False) for t, s in zip(types, shapes, strict=True)] for _ in range(n)]
    return Case(BROADCAST, types, inputs, [inputs[root]] * n, root=root, outputs=outputs)


def allgather(
    rng: np.random.Generator, n: int, types: list[Type], rows: list[list[int]], row: tuple[int, ...]
) -> Case:
    """Rank r gives `rows[r][i]` rows of tensor i."""
    inputs = [
        [t.draw(rng, (k, *row), False) for t, k in zip(types, rows[r], strict=True)]
        for r in range(n)
    ]
    results = [np.concatenate([inputs[r][i] for r in range(n)]) for i in range(len(types))]
    given = any(t.name == "bfloat16" for t in types)
    outputs = "given" if given else str(rng.choice(OUTPUTS))
    return Case(ALLGATHER, types, inputs, [results] * n, outputs=outputs)


def alltoall(
    rng: np.random.Generator, n: int, t: Type, splits: list[list[int]], row: tuple[int, ...]
) -> Case:
    inputs = [[t.draw(rng, (sum(splits[r]), *row), False)] for r in range(n)]
    pieces = [np.split(inputs[r][0], np.cumsum(splits[r])[:-1]) for r in range(n)]
    equal = all(len(set(s)) == 1 for s in splits)
    return Case(
        ALLTOALL,
        [t],
        inputs,
        [[np.concatenate([pieces[y][r] for y in range(n)])] for r in range(n)],
        splits=[None if equal else s for s in splits],
        received=[[splits[y][r] for y in range(n)] for r in range(n)],
        outputs="given" if t.name == "bfloat16" else str(rng.choice(OUTPUTS)),
    )


OUTPUTS = ["given", "allocated"]
SCALES = [(0.5, 1.0), (1.0, 0.25), (1.7, 1.3), (1 / 3, 2.9)]


def reductions(rng: np.random.Generator, n: int, setup: Setup) -> Iterator[Case]:
    places = itertools.cycle(["given", "in place", "allocated"])
    for t in TYPES.values():
        for op, count in itertools.product(t.ops, counts_of(t, n, setup.segment_bytes)):
            outputs = next(places)
            if t.name == "bfloat16" and outputs == "allocated":
                outputs = "given"  # NumPy can't take it over
            case = allreduce(rng, n, [t], op, [(count,)], outputs)
            yield case
            yield reducescatter(rng, case)
        if t.kind == "bool":
            continue
        for op, (pre, post) in itertools.product(t.ops[:2], SCALES):
            case = allreduce(rng, n, [t], op, [(143,)], "given", pre, post)
            yield case
            yield reducescatter(rng, case)
    for shape in [(), (1, 1), (3, 5), (0, 4), (4, 0), (7, 2, 3)]:
        for outputs in ["given", "in place", "allocated"]:
            case = allreduce(rng, n, [TYPES["float32"]], AVERAGE, [shape], outputs)
            yield case
            if shape:
                yield reducescatter(rng, case)
    mixed = [TYPES[name] for name in ["float32", "int8", "float16", "int64", "bfloat16", "float64"]]
    shapes: list[tuple[int, ...]] = [(5,), (333,), (), (2, 3), (700,), (0,)]
    for op, outputs in itertools.product([SUM, AVERAGE, MIN], ["given", "in place"]):
        yield allreduce(rng, n, mixed, op, shapes, outputs)
    rows: list[tuple[int, ...]] = [(5,), (n, 3), (0, 2), (211,), (n - 1, 50), (1,)]
    yield reducescatter(rng, allreduce(rng, n, mixed[:4], SUM, rows[:4], "given"))


def movements(rng: np.random.Generator, n: int, setup: Setup) -> Iterator[Case]:
    places = itertools.cycle(["given", "in place"])
    for t in TYPES.values():
        for count in counts_of(t, n, setup.segment_bytes):
            for root in {0, n - 1, count % n}:
                yield broadcast(rng, n, [t], [(count,)], root, next(places))
            for rows in [
                [[count]] * n,
                [[count + r] for r in range(n)],
                [[count if r == n - 1 else 0] for r in range(n)],
            ]:
                yield allgather(rng, n, [t], rows, ())
            share = count // n
            yield alltoall(rng, n, t, [[share] * n] * n, ())
            uneven = rng.multinomial(count, np.ones(n) / n, n).tolist()
            yield alltoall(rng, n, t, uneven, ())
            yield alltoall(rng, n, t, [[count if r == 0 else 0] * n for r in range(n)], ())
    mixed = [TYPES[name] for name in ["float32", "bool", "complex128", "bfloat16", "int16"]]
    for root in range(n):
        yield broadcast(rng, n, mixed, [(5,), (333,), (), (2, 3), (0,)], root, next(places))
    for row in [(), (3,), (2, 2), (0,)]:
        rows = [[(r + i) % 3 * 40 for i in range(len(mixed))] for r in range(n)]
        yield allgather(rng, n, mixed, rows, row)
        yield alltoall(rng, n, TYPES["int32"], rng.integers(0, 9, (n, n)).tolist(), row)
    for _ in range(3):
        nothing: list[list[Array]] = [[]] * n
        yield Case(BARRIER, [], nothing, nothing)


# -------------------------------------------------------------------------------------------------
# Running them


class Run:
    """One rank's call of a case, from submit to the comparison."""

    def __init__(self, rank: Rank, index: int, case: Case) -> None:
        self.rank, self.case = rank, case
        r = rank.rank
        self.inputs = [x.copy() for x in case.inputs[r]]
        if case.outputs == "in place":
            self.outs: list[Array | None] = list(self.inputs)
        elif case.outputs == "given":
            self.outs = [np.empty_like(x) for x in case.expected[r]]
        else:
            self.outs = [None] * len(self.inputs)
        self.handle = rank.submit(
            case.kind,
            f"case.{index}",
            self.inputs,
            self.outs,
            op=case.op,
            prescale=case.prescale,
            postscale=case.postscale,
            root=case.root,
            splits=case.splits[r] if case.splits else None,
            dtypes=[DTYPES[t.name] for t in case.types],
        )

    def check(self) -> None:
        result = self.rank.finish(self.handle)
        case, r = self.case, self.rank.rank
        for i, expected in enumerate(case.expected[r]):
            out = self.outs[i]
            if out is None:
                out = np.from_dlpack(result.outputs[i])
                assert tuple(result.shapes[i]) == expected.shape, f"{case}: {result.shapes[i]}"
                assert out.dtype == expected.dtype, f"{case}: {out.dtype}"
            # Bytes, so that NaN equals itself and -0 isn't +0.
            if out.tobytes() != expected.tobytes():
                wrong = np.flatnonzero(out.ravel() != expected.ravel())
                raise AssertionError(f"rank {r}, tensor {i} of {case}: wrong at {wrong[:9]}")
            if case.outputs != "in place":
                assert self.inputs[i].tobytes() == case.inputs[r][i].tobytes(), f"input of {case}"
        if case.received:
            assert list(result.splits) == case.received[r], str(case)


IN_FLIGHT = 48


def run_cases(rank: Rank, cases: list[Case]) -> None:
    for first in range(0, len(cases), IN_FLIGHT):
        last = min(first + IN_FLIGHT, len(cases))
        for call in [Run(rank, i, cases[i]) for i in range(first, last)]:
            call.check()


CASES: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def count_cases(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nconformance: {sum(CASES)} cases, each on all ranks of a world")


@pytest.mark.parametrize("family", [reductions, movements], ids=lambda f: f.__name__)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_results_are_the_references_bit_for_bit(
    transport: str,
    n: int,
    setup: Setup,
    family: Callable[[np.random.Generator, int, Setup], Iterator[Case]],
) -> None:
    cases = list(family(np.random.default_rng(n), n, setup))
    with TRANSPORTS[transport](n, setup.plan, {"simd": setup.simd}) as ranks:
        run(ranks, lambda rank: run_cases(rank, cases))
    CASES.append(len(cases))
