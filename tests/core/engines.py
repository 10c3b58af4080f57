"""N engines as N threads of one process, wired by hand; knows no launcher and no framework."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from horovod import _core

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, JOIN = range(7)
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
DTYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bool": 9,
    "bfloat16": 10,
    "complex64": 11,
    "complex128": 12,
}
DEADLINE_S = 30.0


class Failed(Exception):
    """A call ended with an error status."""

    def __init__(self, kind: int, text: str, rank: int) -> None:
        super().__init__(text)
        self.kind, self.text, self.rank = kind, text, rank


class Rank:
    """One rank: the engine, and blocking calls on NumPy arrays (bfloat16: uint16, dtypes=[10])."""

    def __init__(
        self, rank: int, size: int, engine: Any, sockets: list[socket.socket] | None = None
    ) -> None:
        self.rank, self.size, self.engine = rank, size, engine
        self.sockets = sockets if sockets is not None else []

    def submit(
        self,
        kind: int,
        name: str,
        arrays: list[np.ndarray],
        outs: list[np.ndarray | None] | None = None,
        *,
        op: int = SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: list[int] | None = None,
        set_id: int = 0,
        dtypes: list[int] | None = None,
        unnamed: bool = False,
    ) -> int:
        outs = outs if outs is not None else [None] * len(arrays)
        dtypes = dtypes if dtypes is not None else [DTYPES[a.dtype.name] for a in arrays]
        tensors = [
            _core.View(a.ctypes.data, 0 if o is None else o.ctypes.data, dtype, a.shape)
            for a, o, dtype in zip(arrays, outs, dtypes, strict=True)
        ]
        keep = (arrays, outs)
        return self.engine.submit(
            kind, name, set_id, tensors, op, prescale, postscale, root, splits, unnamed, keep
        )

    def finish(self, handle: int) -> Any:
        if not self.engine.wait(handle, DEADLINE_S):
            raise AssertionError(f"rank {self.rank}: handle {handle} took over {DEADLINE_S} s")
        result = self.engine.take(handle)
        if result.kind:
            raise Failed(result.kind, result.text, result.rank)
        return result

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.finish(self.submit(*args, **kwargs))

    def allreduce(self, name: str, array: np.ndarray, **kwargs: Any) -> np.ndarray:
        out = np.empty_like(array)
        self.call(ALLREDUCE, name, [array], [out], **kwargs)
        return out

    def barrier(self, name: str = "barrier", **kwargs: Any) -> None:
        self.call(BARRIER, name, [], **kwargs)

    def join(self) -> int:
        return self.call(JOIN, "join", []).value

    def add_set(self, ranks: list[int]) -> int:
        return self.finish(self.engine.add_process_set(ranks)).value

    def remove_set(self, set_id: int) -> None:
        self.finish(self.engine.remove_process_set(set_id))

    def cut(self) -> None:
        """Ends its connections without a word, as if the process had died."""
        for end in self.sockets:
            end.shutdown(socket.SHUT_RDWR)


def default_plan(**changes: int) -> dict[str, int]:
    return {"segment_bytes": 1 << 20, "outbox_bytes": 8 << 20} | changes


@contextmanager
def engines(
    size: int,
    plan: dict[str, int] | None = None,
    options: dict[str, Any] | None = None,
    *,
    plans: list[dict[str, int]] | None = None,
    breakable: bool = False,
) -> Iterator[list[Rank]]:
    """Ranks 0 to size-1, ready; shut down in good order at the end.

    `plans` gives each rank its own. Only `breakable` ranks can be cut() off: the test then keeps
    their connections open, so that the end of an engine isn't seen by its closed connection.
    """
    plan = plan if plan is not None else default_plan()
    plans = plans if plans is not None else [plan] * size
    options = options if options is not None else {}
    segments, bells, fds = [], [], []
    sockets = [[-1] * size for _ in range(size)]
    ends: list[socket.socket] = []
    ends_of: list[list[socket.socket]] = [[] for _ in range(size)]
    for r in range(size):
        fd = os.memfd_create(f"segment{r}", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, _core.segment_bytes(size, plan["outbox_bytes"]))
        segments.append(fd)
        bells.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        for y in range(r):
            a, b = socket.socketpair()
            ends += [a, b]
            ends_of[r].append(a)
            ends_of[y].append(b)
            sockets[r][y], sockets[y][r] = a.fileno(), b.fileno()
    fds = segments + bells
    try:
        ranks = [
            Rank(
                r,
                size,
                _core.Engine(
                    r,
                    size,
                    [f"host, pid {y}" for y in range(size)],
                    {
                        "segments": segments,
                        "doorbells": bells,
                        "sockets": sockets[r],
                        "pidfds": [-1] * size,
                    },
                    plans[r],
                    options,
                ),
                ends_of[r] if breakable else None,
            )
            for r in range(size)
        ]
    finally:
        for fd in fds:
            os.close(fd)
        for end in ends if not breakable else []:
            end.close()
    try:
        yield ranks
    finally:
        run(
            [rank for rank in ranks if rank.engine is not None],
            lambda rank: rank.engine.shutdown("", 2.0),
        )
        for end in ends:
            end.close()


def run(ranks: list[Rank], body: Callable[[Rank], Any], timeout_s: float = 50.0) -> list[Any]:
    """Runs body(rank) in a thread per rank; the results in rank order, or the first exception."""
    results: list[Any] = [None] * len(ranks)
    errors: list[tuple[int, BaseException]] = []

    def work(i: int) -> None:
        try:
            results[i] = body(ranks[i])
        except BaseException as e:  # handed to the caller below
            errors.append((i, e))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(ranks))]
    for t in threads:
        t.start()
    for i, t in enumerate(threads):
        t.join(timeout_s)
        if t.is_alive():
            pending = [r.engine.pending() for r in ranks]
            raise AssertionError(f"rank {ranks[i].rank} hangs; pending {pending}; errors {errors}")
    if errors:
        raise errors[0][1]
    return results
