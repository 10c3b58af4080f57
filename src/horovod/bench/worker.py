"""What each rank of ``horovod bench`` does: takes turns with the yard-stick, on plain memory.

Knows no framework, no option and no table. Before each turn every element is written anew, and
afterwards all are compared with what they must be; neither is timed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from horovod.bench import limit
from horovod.bench.limit import Kind, Limit, Span
from horovod.common import basics, config, objects, ops
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import Call, DType, ReduceOp, View
from horovod.common.process_sets import global_process_set

_T = TypeVar("_T")

_BLOCK = 1 << 18  # elements; the values of the data repeat after so many
_VALUES = 61  # 1 to this: sums of small integers are exact in float32
_FEWEST_TURNS, _MOST_TURNS = 5, 3000
_TRIALS = 0.25  # the part of the time in which the kinds of the yard-stick are compared


@dataclass(frozen=True)
class Point:
    """One thing to measure: tensors of so many float32, submitted the last one first."""

    name: str
    counts: Sequence[int]

    @property
    def size_bytes(self) -> int:
        """Of all tensors together."""
        return 4 * sum(self.counts)


@dataclass(frozen=True)
class Times:
    """What one rank measured at one point, turn by turn; the same turns on all ranks."""

    ours: list[Span]
    limit: list[Span]
    """Empty if the rank is alone on its host."""
    kind: Kind | None


@dataclass(frozen=True)
class Report:
    """What one rank measured, and on what."""

    hostname: str
    cpu: str
    usable_cores: int
    simd: str
    times: list[Times]


def measure(points: Sequence[Point], seconds: float) -> Report:
    """Measures every point for about so many seconds. All ranks must call it.

    Raises:
        HorovodInternalError: a sum is wrong, memory is refused, or a rank is lost.
    """
    settings = config.from_environ()
    basics.init()
    yard_stick = Limit(settings) if settings.local_size > 1 else None
    times = [_Turns(point, yard_stick).run(seconds) for point in points]
    basics.shutdown()
    return Report(
        settings.hostname,
        _cpu(),
        len(os.sched_getaffinity(0)),
        limit.simd(settings.simd),
        times,
    )


class _Turns:
    """The turns of one point."""

    def __init__(self, point: Point, yard_stick: Limit | None) -> None:
        self._name = point.name
        self._limit = yard_stick
        self._data = _Data(sum(point.counts), basics.rank() + 1)
        self._calls: list[tuple[str, View]] = []  # in the order in which gradients come
        address = self._data.address
        for i, count in enumerate(point.counts):
            view = View(address, address, DType.float32, (count,))
            self._calls.insert(0, (f"bench.{point.name}.{i}", view))
            address += 4 * count

    def run(self, seconds: float) -> Times:
        self._ours()  # names are announced in full, pages are touched
        yard_stick = self._limit
        if yard_stick is None:
            turns = self._agreed(_repeats(seconds, _timed(self._ours)))
            return Times([self._ours() for _ in range(turns)], [], None)
        kind = self._best_kind(yard_stick, seconds * _TRIALS)
        once_s = _timed(lambda: (self._ours(), self._bare(yard_stick, kind)))
        turns = self._agreed(_repeats(seconds * (1 - _TRIALS), once_s))
        times = [(self._ours(), self._bare(yard_stick, kind)) for _ in range(turns)]
        return Times([ours for ours, _ in times], [bare for _, bare in times], kind)

    def _best_kind(self, yard_stick: Limit, seconds: float) -> Kind:
        kinds = yard_stick.kinds(self._data.count)
        once_s = _timed(lambda: [self._bare(yard_stick, kind) for kind in kinds])
        rounds = self._agreed(_repeats(seconds, once_s))
        return self._agreed(limit.fastest(kinds, rounds, lambda kind: self._bare(yard_stick, kind)))

    def _ours(self) -> Span:
        """From when all had come until this rank has all sums."""
        self._data.fill()
        self._together()
        begin = time.monotonic()
        handles = []
        for name, view in self._calls:
            with Call(ops.ALLREDUCE, name, global_process_set) as call:
                handles.append(call.submit([view], _nothing, reduce_op=ReduceOp.Sum))
        for handle in handles:
            ops.synchronize(handle)
        span = Span(begin, time.monotonic())
        self._check("horovod", range(basics.size()))
        return span

    def _bare(self, yard_stick: Limit, kind: Kind) -> Span:
        """The same of the yard-stick."""
        self._data.fill()
        span = yard_stick.allreduce(self._data.address, self._data.count, kind)
        self._check("the yard-stick", yard_stick.ranks)
        return span

    def _check(self, who: str, ranks: Iterable[int]) -> None:
        if not self._data.holds(sum(rank + 1 for rank in ranks)):
            raise HorovodInternalError(
                f"{basics.label()} bench: {who} computed a wrong sum of {self._name}"
            )

    def _together(self) -> None:
        """Waits for the other ranks, on this host as cheaply as it can be done."""
        if self._limit is not None:
            self._limit.barrier()
        else:
            ops.barrier(global_process_set)

    def _agreed(self, value: _T) -> _T:
        """Rank 0's value: what all do next must be the same."""
        agreed: _T = objects.broadcast_object(value, 0, None, global_process_set)
        return agreed


class _Data:
    """One rank's memory, whose values differ by place and are `factor` times those of rank 0."""

    def __init__(self, count: int, factor: int) -> None:
        self.count = count
        self._factor = factor
        self._memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._blocks: dict[int, array[float]] = {}  # by factor

    def fill(self) -> None:
        """Writes all elements."""
        block = self._block(self._factor)
        for offset, size_bytes in self._pieces():
            ctypes.memmove(self.address + offset, block, size_bytes)

    def holds(self, factor: int) -> bool:
        """Whether all elements are `factor` times those of rank 0."""
        block = self._block(factor)
        pieces = self._pieces()
        return all(_memcmp(self.address + offset, block, n) == 0 for offset, n in pieces)

    def _block(self, factor: int) -> int:
        """The address of the values that repeat."""
        if factor not in self._blocks:
            values = array("f", [factor * (i + 1) for i in range(_VALUES)])
            self._blocks[factor] = (values * (_BLOCK // _VALUES + 1))[: min(_BLOCK, self.count)]
        return self._blocks[factor].buffer_info()[0]

    def _pieces(self) -> Iterable[tuple[int, int]]:
        """Where each repetition lies: offset and size, in bytes."""
        end = 4 * self.count
        return ((at, min(4 * _BLOCK, end - at)) for at in range(0, end, 4 * _BLOCK))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _nothing(result: object) -> None:
    """The sums lie where the terms were."""


def _timed(run: Callable[[], object]) -> float:
    start = time.monotonic()
    run()
    return time.monotonic() - start


def _repeats(seconds: float, once_s: float) -> int:
    return max(_FEWEST_TURNS, min(_MOST_TURNS, int(seconds / once_s)))


def _cpu() -> str:
    """The processor's name, as far as the machine tells."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()
