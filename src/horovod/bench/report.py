"""What ``horovod bench`` says: a table and a sentence, or JSON; knows no process and no engine."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod
from horovod.bench.limit import Span
from horovod.bench.points import size_text
from horovod.bench.worker import Point, Report, Times


@dataclass(frozen=True)
class Spread:
    """Seconds that a tenth, half and nine tenths of the turns took at most."""

    p10: float
    p50: float
    p90: float

    @staticmethod
    def of(hosts: Sequence[Sequence[Sequence[Span]]]) -> Spread | None:
        """Of turns, each from when the last rank of a host had come until its slowest was done.

        Args:
            hosts: the spans of each rank of each host; a host's have one clock. The slowest host
                counts.
        """
        durations = [
            [
                max(s.end for s in turn) - max(s.begin for s in turn)
                for turn in zip(*ranks, strict=True)
            ]
            for ranks in hosts
        ]
        turns = sorted(max(turn) for turn in zip(*durations, strict=True))
        if not turns:
            return None
        tenth = len(turns) // 10
        return Spread(turns[tenth], statistics.median(turns), turns[-1 - tenth])


@dataclass(frozen=True)
class Row:
    """One point, measured. ``limit`` is None where no host has several ranks."""

    point: Point
    turns: int
    ours: Spread
    limit: Spread | None
    stores: str
    slot_bytes: int
    bus_bytes_per_s: float

    @property
    def ratio(self) -> float | None:
        """Ours to the limit, by the medians."""
        return None if self.limit is None else self.ours.p50 / self.limit.p50

    @property
    def title(self) -> str:
        """The point in words."""
        tensors = len(self.point.counts)
        if tensors == 1:
            return self.point.name
        return f"{self.point.name}: {tensors} tensors, {self.point.size_bytes / 1e6:.0f} MB"


def rows(points: Sequence[Point], reports: Sequence[Report]) -> list[Row]:
    """What the ranks measured together."""
    size = len(reports)
    found = []
    for point, *ranks in zip(points, *(report.times for report in reports), strict=True):
        hosts: dict[str, list[Times]] = {}
        for report, times in zip(reports, ranks, strict=True):
            hosts.setdefault(report.hostname, []).append(times)
        ours = Spread.of([[times.ours for times in host] for host in hosts.values()])
        shared = [host for host in hosts.values() if host[0].kind is not None]
        kind = shared[0][0].kind if shared else None
        assert ours is not None
        found.append(
            Row(
                point,
                turns=len(ranks[0].ours),
                ours=ours,
                limit=Spread.of([[times.limit for times in host] for host in shared]),
                stores="" if kind is None else ("streaming" if kind.streaming else "ordinary"),
                slot_bytes=0 if kind is None else kind.slot_bytes,
                bus_bytes_per_s=2 * (size - 1) / size * point.size_bytes / ours.p50,
            )
        )
    return found


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def machine(reports: Sequence[Report]) -> dict[str, Any]:
    """What it was measured on: rank 0's machine, and how many ranks each host has."""
    first = reports[0]
    return {
        "cpu": first.cpu,
        "usable_cores": first.usable_cores,
        "ranks_per_host": dict(collections.Counter(report.hostname for report in reports)),
        "horovod": horovod.__version__,
        "simd": first.simd,
    }


def table(found: Sequence[Row], reports: Sequence[Report]) -> str:
    """Everything in words."""
    about = machine(reports)
    per_host = ", ".join(f"{n} on {host}" for host, n in about["ranks_per_host"].items())
    head = ["float32", "ours p10", "p50", "p90", "limit p50", "ours/limit", "bus GB/s"]
    lines = [[*head]]
    for row in found:
        spread = (_duration(seconds) for seconds in (row.ours.p10, row.ours.p50, row.ours.p90))
        limit = "-" if row.limit is None else _duration(row.limit.p50)
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append([row.title, *spread, limit, ratio, f"{row.bus_bytes_per_s / 1e9:.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join(
        [
            f"horovod {about['horovod']}, {about['simd']}; {about['cpu']}; "
            f"{about['usable_cores']} usable cores; ranks: {per_host}",
            "Allreduce in place, until the slowest rank is done; limit: a bare one of the ranks of "
            "a host, through its shared memory.",
            "",
            *("  ".join(line).rstrip() for line in cells),
            "",
            *_sentences(found, len(about["ranks_per_host"])),
        ]
    )


def _sentences(found: Sequence[Row], hosts: int) -> list[str]:
    """How far from the limit: at the largest single tensor, or the first set."""
    single = [row for row in found if len(row.point.counts) == 1]
    row = max(single, key=lambda row: row.point.size_bytes) if single else found[0]
    if row.limit is None:
        return ["No host has several ranks, so there is no shared memory that could be the limit."]
    text = (
        f"{row.title} at {row.ratio:.2f} x the limit of this machine's shared memory: "
        f"{_duration(row.ours.p50)}, where the limit, with {row.stores} stores through slots of "
        f"{size_text(row.slot_bytes)}, is {_duration(row.limit.p50)}."
    )
    if hosts > 1:
        return [
            text,
            "The limit is that of one host; what the network between hosts allows is not.",
        ]
    return [text]


def as_json(found: Sequence[Row], reports: Sequence[Report]) -> str:
    """Everything for programs; durations in seconds."""

    def spread(of: Spread | None) -> Mapping[str, float] | None:
        return None if of is None else vars(of)

    points = [
        {
            "name": row.point.name,
            "bytes": row.point.size_bytes,
            "tensors": len(row.point.counts),
            "turns": row.turns,
            "ours_s": spread(row.ours),
            "limit_s": spread(row.limit),
            "limit_stores": row.stores or None,
            "limit_slot_bytes": row.slot_bytes or None,
            "ratio": row.ratio,
            "bus_bytes_per_s": row.bus_bytes_per_s,
        }
        for row in found
    ]
    content = {"machine": machine(reports), "ranks": len(reports), "points": points}
    return json.dumps(content, indent=2) + "\n"
