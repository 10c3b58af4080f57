"""Who is to blame for a job's end: the first cause, not the first one seen; pure."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

DETECTED = "Horovod detected that one or more processes exited with non-zero status"


@dataclass(frozen=True)
class Exit:
    """How one rank ended.

    Attributes:
        code: exit code; 128 + n for signal n.
        time: when it was seen, on the monotonic clock.
        by_launcher: it ended after the launcher had asked it to.
    """

    rank: int
    code: int
    time: float
    by_launcher: bool = False


@dataclass(frozen=True)
class Fault:
    """What a worker reported before it ended.

    Attributes:
        lost: the rank that it lost, None if the fault was its own.
        exception: for example ``KeyError: 'x'``.
        time: when, on the monotonic clock, which all processes of a machine share.
    """

    lost: int | None
    exception: str
    time: float | None


@dataclass(frozen=True)
class Cause:
    """The verdict.

    Attributes:
        rank: the rank to blame.
        code: what the launcher ends with.
        reason: what the rank, or one that lost it, reported; else None.
        note: what is particular about it, else None; also whose ``code`` is if it isn't the rank's.
    """

    rank: int
    code: int
    reason: str | None = None
    note: str | None = None


def given_up(left: Collection[int], faults: Mapping[int, Fault]) -> bool:
    """Whether nobody who is left will ever end: each was lost by others and says nothing itself.

    Such a rank is stopped, or hangs where not even its engine runs. One that reported something is
    alive: it may have caught the error, and take its time.
    """
    lost = {fault.lost for fault in faults.values()}
    return bool(left) and all(rank in lost and rank not in faults for rank in left)


def parse_fault(data: bytes) -> Fault | None:
    """Reads a worker's report; None if it can't be understood."""
    try:
        report = json.loads(data)
        lost, time = report.get("lost"), report.get("time")
        text = str(report.get("exception") or report.get("text") or "")
    except (ValueError, AttributeError):
        return None
    return Fault(
        lost=lost if isinstance(lost, int) and lost >= 0 else None,
        exception=text,
        time=float(time) if isinstance(time, (int, float)) else None,
    )


def first_cause(exits: Sequence[Exit], faults: Mapping[int, Fault]) -> Cause | None:
    """Finds the rank whose failure made the others fail.

    A rank that reported that it lost another one points to it; the chain is followed to its end.
    Among several ends the earliest wins: by the time of its report, or else of its exit. Whoever
    was ended by the launcher has failed, even if it then ended with 0.

    Returns:
        None if no rank failed.
    """
    by_rank = {exit_.rank: exit_ for exit_ in exits}
    by_itself = [e for e in exits if e.code != 0 and not e.by_launcher]
    failed = sorted(
        by_itself or [e for e in exits if e.code != 0 or e.by_launcher],
        key=lambda e: (e.time, e.rank),
    )
    if not failed:
        return None

    def moment(rank: int) -> float:
        fault, end = faults.get(rank), by_rank.get(rank)
        if fault is not None and fault.time is not None:
            return fault.time
        return end.time if end is not None else float("inf")

    roots = {_root(e.rank, faults, moment) for e in failed}
    normal = {e.rank for e in exits if e.code == 0 and not e.by_launcher}
    guilty = roots - normal
    if guilty:
        rank = min(guilty, key=lambda r: (moment(r), r))
        return _verdict(rank, by_rank.get(rank), faults, failed[0])
    # Everyone points to ranks that ended normally: the job failed because they left.
    first = failed[0]
    left = _root(first.rank, faults, moment)
    known = left != first.rank
    note = f"it still needed rank {left}, which had ended normally" if known else None
    return Cause(first.rank, first.code, _reason(faults.get(first.rank)), note)


def _root(rank: int, faults: Mapping[int, Fault], moment: Callable[[int], float]) -> int:
    """The end of the chain of losses from ``rank``.

    In a circle, whoever reported first had lost somebody who had not lost anybody yet: a rank that
    leaves sees the others fail because of it while it is still there, and reports that.
    """
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        fault = faults.get(rank)
        if fault is None or fault.lost is None:
            return rank
        rank = fault.lost
    circle = path[path.index(rank) :]
    first = min(circle, key=lambda r: (moment(r), r))
    lost = faults[first].lost
    return first if lost is None else lost


def _verdict(rank: int, end: Exit | None, faults: Mapping[int, Fault], first: Exit) -> Cause:
    fault = faults.get(rank)
    own = fault is not None and fault.lost is None
    reason = _reason(fault) if own else None
    if end is not None and not end.by_launcher:
        return Cause(rank, end.code, reason)
    # It was still there when the launcher ended the job.
    if own:
        note = "it had failed but did not end by itself, so the launcher ended it"
        return Cause(rank, 1, reason, f"{note}; the job ends with exit code 1")
    witnesses = [r for r, f in faults.items() if f.lost == rank]
    if witnesses:
        witness = min(witnesses, key=lambda r: (faults[r].time or 0.0, r))
        reason = f"rank {witness} reported: {faults[witness].exception}"
    note = "the launcher ended it"
    if first.rank != rank:
        code, whose = first.code, f", that of rank {first.rank}"
    else:
        code, whose = first.code or 1, ""
    if end is None or code != end.code:
        note += f"; the job ends with exit code {code}{whose}"
    return Cause(rank, code, reason, note)


def _reason(fault: Fault | None) -> str | None:
    return fault.exception or None if fault is not None else None


def _signal_name(code: int) -> str:
    """The signal that an exit code stands for, empty if there is none."""
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def ending(code: int) -> str:
    """How a rank ended, in two words for those who wait for it: ``exit code 0``, ``SIGKILL``."""
    return _signal_name(code) or f"exit code {code}"


def code_text(code: int) -> str:
    """``1``, or ``137 (SIGKILL)`` with a hint where there is one."""
    name = _signal_name(code)
    hint = ", killed from outside, often for want of memory" if name == "SIGKILL" else ""
    return f"{code} ({name}{hint})" if name else str(code)


def last_words(stderr: bytes, code: int) -> str | None:
    """The line that says what happened: that of the last traceback. No other line is a reason.

    Whoever is killed says nothing any more: what a rank that died by a signal wrote before counts
    only if it is the very end, as when a program reports its error and then aborts.

    Args:
        stderr: the end of what the rank wrote.
        code: its exit code; 128 + n for signal n.
    """
    lines = stderr.decode("utf-8", "replace").rstrip().splitlines()
    heads = [i for i, line in enumerate(lines) if line == "Traceback (most recent call last):"]
    if not heads:
        return None
    after = range(heads[-1] + 1, len(lines))
    end = next((i for i in after if lines[i] and not lines[i][0].isspace()), None)
    if end is None or (_signal_name(code) and end != len(lines) - 1):
        return None
    return lines[end].strip()
