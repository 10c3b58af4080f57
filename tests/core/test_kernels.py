"""The laws of the kernels, against NumPy and Python integers; every instruction set bit for bit.

Knows `_core.fold`, `_core.copy_to_slot` and `_core.simd_available` only, no engine.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod import _core

Array = npt.NDArray[Any]

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
ALIGNMENT = 64
SIMD = _core.simd_available()
FASTER = [simd for simd in SIMD if simd != "baseline"]
COUNTS = [*range(71), 1000, 1009]


@dataclass(frozen=True)
class Type:
    id: int
    name: str
    storage: str  # the dtype of the arrays that hold it
    kind: str  # integer, float, bool or complex

    @property
    def size(self) -> int:
        return np.dtype(self.storage).itemsize

    @property
    def ops(self) -> list[int]:
        if self.kind == "complex":
            return [SUM, AVERAGE, PRODUCT]
        return [SUM, MIN, MAX, PRODUCT] + ([AVERAGE] if self.kind != "bool" else [])


TYPES = [
    Type(0, "uint8", "u1", "integer"),
    Type(1, "int8", "i1", "integer"),
    Type(2, "uint16", "u2", "integer"),
    Type(3, "int16", "i2", "integer"),
    Type(4, "int32", "i4", "integer"),
    Type(5, "int64", "i8", "integer"),
    Type(6, "float16", "f2", "float"),
    Type(7, "float32", "f4", "float"),
    Type(8, "float64", "f8", "float"),
    Type(9, "bool", "u1", "bool"),
    Type(10, "bfloat16", "u2", "float"),
    Type(11, "complex64", "c8", "complex"),
    Type(12, "complex128", "c16", "complex"),
]
BY_NAME = {t.name: t for t in TYPES}
CASES = [pytest.param(t, op, id=f"{t.name}-{op}") for t in TYPES for op in t.ops]


@dataclass(frozen=True)
class Factors:
    prescale: float = 1.0
    postscale: float = 1.0
    divisor: int = 1


NO_FACTORS = Factors()
FACTORS = [
    NO_FACTORS,
    Factors(divisor=3),
    Factors(divisor=49),
    Factors(prescale=0.3),
    Factors(prescale=-1.7, postscale=2.9, divisor=5),
    Factors(postscale=3.0, divisor=3),
    Factors(postscale=1e300, divisor=2),
]

# ---------------------------------------------------------------------------------------------
# The reference: element by element, in the arithmetic the laws name.


def decode(t: Type, x: Array) -> Array:
    if t.name == "float16":
        return x.astype(np.float32)
    if t.name == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    if t.kind == "bool":
        return x != 0
    return x


def encode(t: Type, x: Array) -> Array:
    if t.name == "float16":
        return x.astype(np.float16)
    if t.name == "bfloat16":
        return nearest_bfloat16(x)
    return x.astype(t.storage)


def nearest_bfloat16(x: Array) -> Array:
    """Of the two neighbours the nearer, of two as near the even one; NaN is 0x7fc0."""
    below = (x.view(np.uint32) >> 16).astype(np.uint16)  # toward zero
    above = below + np.uint16(1)

    def value(bits: Array) -> Array:
        wide = decode(BY_NAME["bfloat16"], bits).astype(np.float64)
        return np.where(
            np.isinf(wide), np.copysign(2.0**128, wide), wide
        )  # as if exponents went on

    exact = x.astype(np.float64)
    to_below, to_above = np.abs(exact - value(below)), np.abs(value(above) - exact)
    up = (to_above < to_below) | ((to_above == to_below) & (below % 2 == 1))
    rounded = np.where(up & np.isfinite(x), above, below)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def extreme(op: int, a: Array, b: Array) -> Array:
    """IEEE 754-2019 minimum or maximum: NaN wins, -0 is below +0."""
    if a.dtype.kind != "f":
        return np.minimum(a, b) if op == MIN else np.maximum(a, b)
    below = (a < b) | ((a == b) & np.signbit(a))
    chosen = np.where(below, a, b) if op == MIN else np.where(below, b, a)
    return np.where(np.isnan(a), a, np.where(np.isnan(b), b, chosen))


def combine(t: Type, op: int, a: Array, b: Array) -> Array:
    if t.kind == "bool":
        return a | b if op in (SUM, MAX) else a & b
    if op in (MIN, MAX):
        return extreme(op, a, b)
    if op in (SUM, AVERAGE):
        return a + b
    if t.kind == "complex":
        out = np.empty_like(a)
        out.real = a.real * b.real - a.imag * b.imag
        out.imag = a.real * b.imag + a.imag * b.real
        return out
    return a * b


def scale_integers(t: Type, x: Array, factor: float) -> Array:
    limits = np.iinfo(t.storage)
    scaled = (factor * float(int(element)) for element in x)
    return np.array(
        [
            0 if v != v
            else limits.min if v <= limits.min
            else limits.max if v >= limits.max
            else int(v)
            for v in scaled
        ],
        dtype=t.storage,
    )  # fmt: skip


def divide_integers(t: Type, x: Array, divisor: int) -> Array:
    quotients = [abs(int(v)) // divisor * (-1 if v < 0 else 1) for v in x]
    return np.array(quotients, dtype=t.storage)


def scale_floats(x: Array, factor: float) -> Array:
    if factor == 1.0:
        return x
    part = x.real.dtype.type  # the factor is real: no complex product with its 0 * inf
    return (x.view(part) * part(factor)).view(x.dtype)


@np.errstate(all="ignore")
def reference(t: Type, op: int, factors: Factors, terms: list[Array]) -> Array:
    values = [decode(t, term) for term in terms]
    if t.kind == "integer" and factors.prescale != 1.0:
        values = [scale_integers(t, v, factors.prescale) for v in values]
    elif t.kind in ("float", "complex"):
        values = [scale_floats(v, factors.prescale) for v in values]
    acc = values[0]
    for value in values[1:]:
        acc = combine(t, op, acc, value)
    if t.kind == "integer":
        if factors.divisor != 1:
            acc = divide_integers(t, acc, factors.divisor)
        if factors.postscale != 1.0:
            acc = scale_integers(t, acc, factors.postscale)
    elif t.kind in ("float", "complex"):
        acc = scale_floats(acc, factors.postscale / factors.divisor)
    return encode(t, acc)


def comparable(t: Type, x: Array) -> bytes:
    """The bits, with all NaNs alike: which NaN a sum of several is, is not promised."""
    if t.name == "bfloat16":
        nan = (x & 0x7FFF) > 0x7F80
        return np.where(nan, np.uint16(0x7FC0), x).astype(np.uint16).tobytes()
    if t.kind in ("float", "complex"):
        parts = x.view(x.real.dtype)
        return np.where(np.isnan(parts), parts.dtype.type(np.nan), parts).tobytes()
    return x.tobytes()


# ---------------------------------------------------------------------------------------------
# Data and memory.


def bits_of(values: list[float], t: Type) -> Array:
    with np.errstate(all="ignore"):
        if t.name == "bfloat16":
            return nearest_bfloat16(np.array(values, np.float32))
        return np.array(values, np.dtype(t.storage).type(0).real.dtype)


def specials(t: Type) -> Array:
    """Elements of which each is a corner of the format."""
    if t.kind == "bool":
        return np.array([0, 1, 2, 128, 255], np.uint8)
    if t.kind == "integer":
        limits = np.iinfo(t.storage)
        return np.array([limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max], t.storage)
    tiny = {
        "float16": 2.0**-24,
        "bfloat16": 2.0**-133,
        "float32": 2.0**-149,
        "complex64": 2.0**-149,
    }
    least = tiny.get(t.name, 5e-324)
    huge = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4e38, "complex64": 3.4e38}
    most = huge.get(t.name, 1.79e308)
    values = [0.0, least, 1.0, 1 + 2.0**-8, 2049.0, most, float("inf")]
    parts = bits_of([*values, *(-v for v in values), float("nan")], t)
    if t.kind == "float":
        return parts
    return np.stack(np.meshgrid(parts, parts), axis=-1).view(t.storage).ravel()


def random_terms(t: Type, n_terms: int, count: int, seed: int = 0) -> list[Array]:
    """Uniform bits (so every exponent), ordinary numbers and special ones, a third each."""
    rng = np.random.default_rng([seed, t.id, n_terms, count])
    corners = specials(t)
    terms = []
    for _ in range(n_terms):
        term = rng.integers(0, 256, count * t.size, np.uint8).view(t.storage).copy()
        kind = rng.integers(0, 3, count)
        if t.kind in ("float", "complex"):
            parts = 1 if t.kind == "float" else 2
            usual = bits_of(list(rng.normal(size=count * parts)), t).view(t.storage)
            term[kind == 1] = usual[kind == 1]
        term[kind == 2] = rng.choice(corners, count)[kind == 2]
        terms.append(term)
    return terms


class Buffer:
    """`nbytes` at `offset` from an aligned address, with guard bytes on both sides."""

    GUARD = 0xA5

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        self._raw = np.full(nbytes + 4 * ALIGNMENT + offset, self.GUARD, np.uint8)
        self._start = -self._raw.ctypes.data % ALIGNMENT + ALIGNMENT + offset
        self.bytes = self._raw[self._start : self._start + nbytes]

    @classmethod
    def of(cls, x: Array, offset: int = 0) -> Buffer:
        buffer = cls(x.nbytes, offset)
        buffer.bytes[:] = np.frombuffer(x.tobytes(), np.uint8)
        return buffer

    @property
    def address(self) -> int:
        return int(self._raw.ctypes.data) + self._start

    def read(self, dtype: str) -> Array:
        return np.frombuffer(self.bytes.tobytes(), dtype)

    def untouched_around(self, padding: int = 0) -> bool:
        end = self._start + len(self.bytes) + padding
        return bool((self._raw[: self._start] == self.GUARD).all()) and bool(
            (self._raw[end:] == self.GUARD).all()
        )


def padding_of(nbytes: int) -> int:
    return -nbytes % ALIGNMENT


def fold(
    simd: str,
    t: Type,
    op: int,
    terms: list[Array],
    factors: Factors = NO_FACTORS,
    *,
    offsets: tuple[int, ...] = (0,),
    in_place: int | None = None,
    to_slot: bool = True,
    streaming: bool = True,
) -> Array:
    """Folds copies of `terms`; `in_place` names the term that is also the output."""
    buffers = [Buffer.of(x, offsets[i % len(offsets)]) for i, x in enumerate(terms)]
    nbytes = terms[0].nbytes
    out = Buffer(nbytes, offsets[-1]) if in_place is None else buffers[in_place]
    slot = Buffer(nbytes)
    _core.fold(
        simd, t.id, op, factors.prescale, factors.postscale, factors.divisor,
        [b.address for b in buffers], out.address, slot.address if to_slot else 0, streaming,
        len(terms[0]),
    )  # fmt: skip
    for i, (buffer, x) in enumerate(zip(buffers, terms, strict=True)):
        assert i == in_place or buffer.bytes.tobytes() == x.tobytes(), "a term was changed"
    assert all(b.untouched_around() for b in [out, *buffers])
    assert slot.untouched_around(padding_of(nbytes) if to_slot else 0)
    if to_slot:
        assert slot.bytes.tobytes() == out.bytes.tobytes()
    else:
        assert (slot.bytes == Buffer.GUARD).all()
    return out.read(t.storage)


def assert_follows(t: Type, op: int, factors: Factors, terms: list[Array], got: Array) -> None:
    want = reference(t, op, factors, terms)
    if comparable(t, got) != comparable(t, want):
        size = t.size
        a, b = comparable(t, got), comparable(t, want)
        i = next(k for k in range(len(got)) if a[k * size :][:size] != b[k * size :][:size])
        given_ = [x[i] for x in terms]
        pytest.fail(f"{t.name} op {op} {factors} of {given_}: {got[i]!r}, should be {want[i]!r}")


# ---------------------------------------------------------------------------------------------
# The laws.


def test_instruction_sets_have_names() -> None:
    assert "baseline" in SIMD
    assert set(SIMD) <= {"baseline", "avx2", "avx512"}
    _core.copy_to_slot("auto", 0, True, 0, 0)
    with pytest.raises(ValueError, match=r"'sse9'.*auto, baseline, avx2 and avx512"):
        _core.copy_to_slot("sse9", 0, True, 0, 0)


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize(("t", "op"), CASES)
def test_fold_follows_the_reference(simd: str, t: Type, op: int) -> None:
    for i, factors in enumerate(FACTORS):
        for n_terms in (1, 2, 3, 5):
            terms = random_terms(t, n_terms, 203, seed=i)
            assert_follows(t, op, factors, terms, fold(simd, t, op, terms, factors))


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("t", TYPES, ids=lambda t: t.name)
def test_every_count(simd: str, t: Type) -> None:
    longest = random_terms(t, 3, max(COUNTS))
    whole = reference(t, SUM, NO_FACTORS, longest)
    for count in COUNTS:
        terms = [x[:count] for x in longest]
        got = fold(simd, t, SUM, terms)
        assert comparable(t, got) == comparable(t, whole[:count]), count


@pytest.mark.parametrize("simd", FASTER)
@pytest.mark.parametrize(("t", "op"), CASES)
def test_instruction_sets_agree(simd: str, t: Type, op: int) -> None:
    for factors in FACTORS[:2] + FACTORS[4:5]:
        for count in (1009, 70, 33):
            terms = random_terms(t, 4, count, seed=1)
            want = comparable(t, fold("baseline", t, op, terms, factors))
            assert comparable(t, fold(simd, t, op, terms, factors)) == want


@pytest.mark.parametrize("simd", SIMD)
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_call(simd: str, data: st.DataObject) -> None:
    t = data.draw(st.sampled_from(TYPES))
    op = data.draw(st.sampled_from(t.ops))
    n_terms = data.draw(st.integers(1, 9))
    count = data.draw(st.integers(0, 400) | st.integers(400, 3000))
    factors = Factors(
        data.draw(st.just(1.0) | st.floats(-1e4, 1e4)),
        data.draw(st.just(1.0) | st.floats(-1e4, 1e4)),
        data.draw(st.just(1) | st.integers(1, 2**32 - 1)),
    )
    if t.kind == "integer" and factors != NO_FACTORS:
        count = min(count, 100)  # the reference is slow there
    offsets = data.draw(st.tuples(st.integers(0, 65), st.integers(0, 65)))
    in_place = data.draw(st.none() | st.integers(0, n_terms - 1))
    terms = random_terms(t, n_terms, count, seed=data.draw(st.integers(0, 99)))
    got = fold(
        simd,
        t,
        op,
        terms,
        factors,
        offsets=offsets,
        in_place=in_place,
        to_slot=data.draw(st.booleans()),
    )
    assert_follows(t, op, factors, terms, got)


@pytest.mark.parametrize("simd", SIMD)
def test_terms_are_added_from_left_to_right(simd: str) -> None:
    t = BY_NAME["float32"]
    terms = [np.full(50, x, np.float32) for x in (1.0, 2.0**24, -(2.0**24))]
    assert (fold(simd, t, SUM, terms) == 0).all()  # 1 + 2**24 is 2**24
    assert (fold(simd, t, SUM, terms[1:] + terms[:1]) == 1).all()


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_sums_round_once(simd: str, name: str) -> None:
    t = BY_NAME[name]
    one, small = 2048.0 if name == "float16" else 256.0, 1.0  # half a unit in the last place
    terms = [bits_of([x] * 40, t) for x in (one, small, small)]
    want = bits_of([one + 2] * 40, t)  # rounded after each addition, both would vanish
    assert fold(simd, t, SUM, terms).tobytes() == want.tobytes()


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_floats_survive(simd: str, name: str) -> None:
    t = BY_NAME[name]
    every = np.arange(65536, dtype=np.uint16)
    got = fold(simd, t, SUM, [every.view(t.storage)]).view(np.uint16)
    infinity, quiet = (0x7C00, 0x200) if name == "float16" else (0x7F80, 0x40)
    nan = (every & 0x7FFF) > infinity
    assert (got == np.where(nan, every | quiet, every)).all()


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_rounding(simd: str, name: str) -> None:
    """All 65536 values, scaled to lie on, beside and halfway between those of the format."""
    t = BY_NAME[name]
    every = np.arange(65536, dtype=np.uint16).view(t.storage)
    halfway = [0.5, 1 + 2.0**-11, 1 + 2.0**-8, 1 + 2.0**-9]
    beside = [np.nextafter(np.float32(x), np.float32(d)) for x in halfway for d in (0, 2)]
    for scale in [*halfway, *map(float, beside), 1 / 3, 2.0**-12, 3e4, 1e-40]:
        factors = Factors(postscale=scale)
        assert_follows(t, SUM, factors, [every], fold(simd, t, SUM, [every], factors))
    for shift in (1, 255, 256, 4097, 20000, 40000):
        terms = [every, np.roll(every, shift)]
        assert_follows(t, SUM, NO_FACTORS, terms, fold(simd, t, SUM, terms))
        assert_follows(t, PRODUCT, NO_FACTORS, terms, fold(simd, t, PRODUCT, terms))


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_extremes_do_not_depend_on_the_order(simd: str, name: str) -> None:
    t = BY_NAME[name]
    values = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")]
    a = bits_of([x for x in values for _ in values], t)
    b = bits_of(values * len(values), t)
    for op in (MIN, MAX):
        one, other = fold(simd, t, op, [a, b]), fold(simd, t, op, [b, a])
        assert one.tobytes() == other.tobytes()
        assert_follows(t, op, NO_FACTORS, [a, b], one)


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("t", [t for t in TYPES if t.kind == "integer"], ids=lambda t: t.name)
def test_integers_divide_exactly(simd: str, t: Type) -> None:
    limits = np.iinfo(t.storage)
    for n in (2, 3, 7, 49, 98, 103, 107, 2**31 - 1, 2**31, 2**32 - 1):
        values = {k * n + d for k in (-3, -1, 0, 1, 2, limits.max // n) for d in (-1, 0, 1)}
        x = np.array([v for v in values if limits.min <= v <= limits.max], t.storage)
        assert_follows(
            t, AVERAGE, Factors(divisor=n), [x], fold(simd, t, AVERAGE, [x], Factors(divisor=n))
        )


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("t", [t for t in TYPES if t.kind == "integer"], ids=lambda t: t.name)
def test_integers_saturate_when_scaled(simd: str, t: Type) -> None:
    x = specials(t)
    edge = np.nextafter(1.0, 2.0)
    for f in (
        0.5,
        2.0,
        edge,
        1 / edge,
        -1.0,
        1e30,
        -1e30,
        float("inf"),
        float("-inf"),
        float("nan"),
    ):
        for factors in (Factors(prescale=f), Factors(postscale=f)):
            assert_follows(t, SUM, factors, [x], fold(simd, t, SUM, [x], factors))


@pytest.mark.parametrize("simd", SIMD)
def test_a_factor_of_one_changes_nothing(simd: str) -> None:
    t = BY_NAME["int64"]
    x = np.array([2**53 + 1, -(2**63), 2**63 - 1] * 9)  # doubles can't hold them
    assert (fold(simd, t, SUM, [x], Factors(prescale=1.0, postscale=1.0)) == x).all()
    assert (fold(simd, t, SUM, [x], Factors(divisor=1, postscale=1.0)) == x).all()


@pytest.mark.parametrize("simd", SIMD)
def test_large_in_place_folds(simd: str) -> None:
    """Longer than the caches' blocks, the first and the last term in place."""
    t = BY_NAME["float32"]
    terms = random_terms(t, 2, 300_001)
    want = comparable(t, reference(t, SUM, NO_FACTORS, terms))
    for in_place in (0, 1):
        got = fold(simd, t, SUM, terms, offsets=(4, 28), in_place=in_place)
        assert comparable(t, got) == want


# ---------------------------------------------------------------------------------------------
# Copies, and the ends of memory.


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("simd", SIMD)
def test_copy_to_slot(simd: str, streaming: bool) -> None:
    rng = np.random.default_rng(7)
    sizes = [*range(130), 2047, 2048, 2049, 2111, 4095, 4096, 4097, 10_007, 1 << 20]
    for nbytes in sizes:
        source = Buffer.of(rng.integers(0, 256, nbytes, np.uint8), offset=nbytes % 65)
        slot = Buffer(nbytes)
        _core.copy_to_slot(simd, slot.address, streaming, source.address, nbytes)
        assert slot.bytes.tobytes() == source.bytes.tobytes(), nbytes
        assert slot.untouched_around(padding_of(nbytes)), nbytes
        assert source.untouched_around(), nbytes


@pytest.fixture
def cliff() -> Iterator[int]:
    """The address at which readable and writable memory ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, 3 * page)
    anchor = ctypes.c_char.from_buffer(pages)
    start = ctypes.addressof(anchor)
    last = ctypes.c_void_p(start + 2 * page)
    assert libc.mprotect(last, ctypes.c_size_t(page), 0) == 0
    yield start + 2 * page
    assert libc.mprotect(last, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE) == 0
    del anchor
    pages.close()


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("t", TYPES, ids=lambda t: t.name)
def test_stores_differ_in_speed_only(simd: str, t: Type) -> None:
    """What a fold writes, to its output and to a slot, are the same bits with either kind."""
    rng = np.random.default_rng(11)
    for nbytes in [64, 1984, 2048, 2112, 4096, 20_032]:
        count = nbytes // t.size - 1
        terms = [rng.integers(0, 2 if t.name == "bool" else 256, count * t.size, np.uint8)] * 3
        arrays = [term.view(t.storage) for term in terms]
        for op in t.ops:
            both = [fold(simd, t, op, arrays, streaming=streaming) for streaming in (False, True)]
            assert both[0].tobytes() == both[1].tobytes(), (op, nbytes)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("simd", SIMD)
def test_nothing_beyond_the_end_is_touched(simd: str, streaming: bool, cliff: int) -> None:
    """A read or write too far would end the process."""
    for nbytes in [*range(0, 132), 2047, 2049, 4099]:
        slot = Buffer(nbytes)
        _core.copy_to_slot(simd, slot.address, streaming, cliff - nbytes, nbytes)
    for t in TYPES:
        for count in [*range(0, 70), 2047 // t.size, 4099 // t.size]:
            at = cliff - count * t.size
            slot = Buffer(count * t.size)
            _core.fold(simd, t.id, SUM, 1.0, 1.0, 1, [at, at], at, slot.address, streaming, count)
