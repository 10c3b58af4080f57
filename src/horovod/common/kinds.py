"""The core's kinds of error as Python's exceptions; must not know any engine."""

from __future__ import annotations

import itertools

from horovod.common.exceptions import (
    HorovodInternalError,
    MismatchError,
    PeerLostError,
    ResourceError,
    ShutdownError,
    StallError,
)

INVALID_ARGUMENT, MISMATCH, PEER_LOST, TIMEOUT, SHUTDOWN, UNAVAILABLE, RESOURCE = range(1, 8)

_BUILT_IN: dict[int, type[Exception]] = {INVALID_ARGUMENT: ValueError, UNAVAILABLE: ImportError}
_OURS: dict[int, type[HorovodInternalError]] = {
    MISMATCH: MismatchError,
    PEER_LOST: PeerLostError,
    TIMEOUT: StallError,
    SHUTDOWN: ShutdownError,
    RESOURCE: ResourceError,
}


def exception(kind: int, text: str, rank: int, host: str | None, op: str) -> Exception:
    """The exception for an error of the core.

    Args:
        kind: what sort of error it is.
        text: what happened, in words.
        rank: who is to blame, -1 if nobody is.
        host: the host of that rank.
        op: the full name of the operation.
    """
    built_in = _BUILT_IN.get(kind)
    if built_in is not None:
        return built_in(text)
    return _OURS.get(kind, HorovodInternalError)(
        text,
        rank=rank if rank >= 0 else None,
        host=host,
        op=op,
        submitted=_submitted(text, op) if kind == MISMATCH else None,
    )


def _submitted(text: str, op: str) -> str | None:
    """What follows the call in ``[horovod 0/2] allreduce "x": ...``; None if that isn't the form.

    A name may hold anything, also quotes and colons, so it is cut off by what it is known to be.
    The core leaves the operation out of it and shortens a long one.
    """
    shown = text.partition(' "')[2]
    for name in (op, op.partition(".")[2]):
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shown, name, strict=False))
        same = sum(1 for _ in equal)
        end = '": ' if same == len(name) else '...": '
        if shown.startswith(end, same):
            return shown[same + len(end) :] or None
    return None
