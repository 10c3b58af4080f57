"""The yard-stick on this host: its memory and the kinds of it; knows no clock and no point.

The core's ``Limit`` is a bare allreduce of the ranks of one host. How it stores into shared memory,
and in which slots, is for the caller to try: what is fastest depends on the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from horovod import _core
from horovod.common import basics, objects
from horovod.common.config import Settings
from horovod.common.exceptions import ResourceError
from horovod.common.process_sets import global_process_set

_SLOTS_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_MOST_BYTES = 256 << 20  # of all slots together
_PATIENCE_S = 30.0

_T = TypeVar("_T")


class Span(NamedTuple):
    """From when to when one rank was at it: seconds of its host's monotonic clock."""

    begin: float
    end: float


class Kind(NamedTuple):
    """One way of running the yard-stick."""

    streaming: bool
    slot_bytes: int


def fastest(kinds: Sequence[Kind], rounds: int, run: Callable[[Kind], Span]) -> Kind:
    """The kind that had the fastest turn of all on this rank, when each had one in every round.

    The fastest of few, not the middle: what disturbs one turn says nothing about its kind.
    """
    turns = [(run(kind), kind) for _ in range(rounds) for kind in kinds]
    return min(turns, key=lambda turn: turn[0].end - turn[0].begin)[1]


def simd(wanted: str) -> str:
    """The instruction set whose kernels run if ``wanted`` is what the settings say."""
    return _core.simd_available()[-1] if wanted == "auto" else wanted


class Limit:
    """This rank's side of the yard-stick of its host. All ranks of the job make one together.

    Args:
        settings: this rank's.

    Attributes:
        ranks: who takes part: the ranks of this host, by their local ranks.

    Raises:
        ResourceError: there is no shared memory, or it can't be reached.
    """

    def __init__(self, settings: Settings) -> None:
        size = settings.local_size
        fitting = [b for b in _SLOTS_BYTES if b * 2 * size <= _MOST_BYTES]
        self._slots_bytes = fitting or [_SLOTS_BYTES[0]]
        most = self._slots_bytes[-1]
        with contextlib.ExitStack() as open_until_all_have_it:
            own = -1
            if settings.local_rank == 0:
                own = _memory(_core.limit_bytes(size, most))
                open_until_all_have_it.callback(os.close, own)
            place = (settings.hostname, settings.local_rank, os.getpid(), own)
            places = objects.allgather_object(place, "bench.places", global_process_set)
            here = [rank for rank, (host, *_) in enumerate(places) if host == settings.hostname]
            self.ranks = sorted(here, key=lambda rank: places[rank][1])
            _, _, pid, descriptor = places[self.ranks[0]]
            spin = size <= len(os.sched_getaffinity(0))
            memory = own if own >= 0 else _opened(pid, descriptor)
            try:
                self._core = self._told(
                    lambda: _core.Limit(
                        settings.local_rank, size, memory, most, settings.simd, _PATIENCE_S, spin
                    )
                )
            finally:
                if memory != own:
                    os.close(memory)
            self.barrier()

    def kinds(self, count: int) -> list[Kind]:
        """The ways to run it that differ for so many elements."""
        slots_bytes = [b for b in self._slots_bytes if b < 4 * count]
        slots_bytes += self._slots_bytes[len(slots_bytes) :][:1]  # one that takes all at once
        return [Kind(streaming, b) for streaming in (False, True) for b in slots_bytes]

    def barrier(self) -> None:
        """Waits for the ranks of this host, for at most 30 s.

        Raises:
            PeerLostError: one of them didn't come.
        """
        self._told(self._core.barrier)

    def allreduce(self, address: int, count: int, kind: Kind) -> Span:
        """Sums ``count`` float32 at ``address`` over the ranks of this host, in place.

        Returns:
            When all had come and this rank went on, and when it had all sums.

        Raises:
            PeerLostError: a rank didn't come.
        """
        return Span(
            *self._told(
                lambda: self._core.allreduce(address, count, kind.slot_bytes, kind.streaming)
            )
        )

    def _told(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except basics.Failure as failure:
            error, text, local_rank = failure.args
            rank = self.ranks[local_rank] if local_rank >= 0 else -1
            raise basics.translated(basics.Failure(error, text, rank), "bench.limit") from None


def _memory(size_bytes: int) -> int:
    try:
        descriptor = os.memfd_create("horovod-bench", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        text = f"no {size_bytes} bytes of shared memory for the yard-stick: {error.strerror}"
        raise ResourceError(f"{basics.label()} bench: {text}") from error
    return descriptor


def _opened(pid: int, descriptor: int) -> int:
    """A descriptor of another rank's, which is the same user's."""
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        text = f"the yard-stick's memory can't be reached through /proc: {error.strerror}"
        raise ResourceError(f"{basics.label()} bench: {text}") from error
