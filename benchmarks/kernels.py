"""How fast the kernels fold and copy, per instruction set, beside memcpy. Knows no engine.

Run: python benchmarks/kernels.py [bytes of a result ...]

The ways to do a row take turns; a cell is the median of its turns in GB/s of result and, in
parentheses, how many times memcpy's rate of the same turns that is.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from horovod import _core

Way = Callable[[], object]

INT32, FLOAT16, FLOAT32, BFLOAT16 = 4, 6, 7, 10
SUM, MIN = 1, 3
ALIGNMENT = 64
MAX_TERMS = 4

# Name, dtype, bytes of an element, op, divisor, number of terms, whether a slot gets it too.
FOLDS = [
    ("float32 sum of 2", FLOAT32, 4, SUM, 1, 2, False),
    ("float32 sum of 2, to slot", FLOAT32, 4, SUM, 1, 2, True),
    ("float32 average of 2, to slot", FLOAT32, 4, SUM, 2, 2, True),
    ("float32 min of 2, to slot", FLOAT32, 4, MIN, 1, 2, True),
    ("float32 sum of 4, to slot", FLOAT32, 4, SUM, 1, 4, True),
    ("float16 sum of 2, to slot", FLOAT16, 2, SUM, 1, 2, True),
    ("bfloat16 sum of 2, to slot", BFLOAT16, 2, SUM, 1, 2, True),
    ("int32 average of 2, to slot", INT32, 4, SUM, 2, 2, True),
]


def medians(ways: dict[str, Way], nbytes: int) -> dict[str, float]:
    """Seconds a call."""
    calls = max(1, (1 << 20) // nbytes)
    turns = 41 if nbytes <= 1 << 20 else 9
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            way()  # the caches are this way's
            start = time.perf_counter()
            for _ in range(calls):
                way()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(t) for name, t in times.items()}


def print_row(name: str, ways: dict[str, Way], nbytes: int) -> None:
    seconds = medians(ways, nbytes)
    cells = [f"{nbytes / s / 1e9:.1f} ({seconds['memcpy'] / s:.2f})" for s in seconds.values()]
    print(f"  {name:30}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def measure(nbytes: int) -> None:
    # Staggered by a line each, lest the terms compete for the same sets of the caches.
    stride = -(-nbytes // 4096) * 4096 + ALIGNMENT
    memory = np.ones(stride * (MAX_TERMS + 1) + ALIGNMENT, np.uint8)
    slot = memory.ctypes.data + -memory.ctypes.data % ALIGNMENT
    terms = [slot + (i + 1) * stride for i in range(MAX_TERMS)]

    simds = _core.simd_available()
    columns = "".join(f"{name:>14}" for name in ["memcpy", *simds])
    print(f"{f'{nbytes} bytes':32}{columns}")
    memcpy: dict[str, Way] = {"memcpy": partial(ctypes.memmove, slot, terms[0], nbytes)}
    for streaming in (False, True):
        copies = {
            s: partial(_core.copy_to_slot, s, slot, streaming, terms[0], nbytes) for s in simds
        }
        name = "streaming" if streaming else "ordinary"
        print_row(f"copy to slot, {name} stores", memcpy | copies, nbytes)
    for name, dtype, size, op, divisor, n_terms, to_slot in FOLDS:
        folds = {
            s: partial(
                _core.fold, s, dtype, op, 1.0, 1.0, divisor,
                terms[:n_terms], terms[0], slot if to_slot else 0, True, nbytes // size,
            )
            for s in simds
        }  # fmt: skip
        print_row(name, memcpy | folds, nbytes)


if __name__ == "__main__":
    for size in [int(x) for x in sys.argv[1:]] or [1 << 16, 1 << 18, 1 << 22, 1 << 26]:
        measure(size)
