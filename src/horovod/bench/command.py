"""The command ``horovod bench``: options to points, a job of the launcher, and its report.

Knows no engine: what runs in the ranks is in ``worker``.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod.bench import report, worker
from horovod.bench.points import MODELS, SIZES_BYTES, size_text
from horovod.bench.worker import Point
from horovod.runner import function, launch, placement
from horovod.runner.driver import Outcome

_NUMBER = re.compile(r"(\d{1,15})([KMG]?)(?:I?B)?", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_BYTES = 1 << 36
_MOST_SECONDS = 3600


def run_commandline(argv: Sequence[str] | None = None) -> int:
    """Runs ``horovod bench`` and returns its exit status, which is as ``horovodrun``'s."""
    launch.prepare_process()
    try:
        args = parse_args(argv)
        points = _points(args)
        spec = launch.job_spec(args, function.task_argv(), foreground=True)
        if args.json is not None:
            _try_to_write(args.json)
    except ValueError as error:
        return launch.refused(error)
    launch.tell(f"points: {len(points)}, ranks: {args.num_proc}, about {args.seconds:g} s each")

    def job() -> Outcome:
        done = function.call(spec, worker.measure, (points, args.seconds), {})
        if done.outcome.code == 0:
            reports = function.results_of(done, len(spec.slots))
            found = report.rows(points, reports)
            # First what was measured, which a disk that is full by now shall not cost.
            sys.stdout.write(report.table(found, reports) + "\n")
            sys.stdout.flush()
            if args.json is not None:
                args.json.write_text(report.as_json(found, reports), "utf-8")
        return done.outcome

    return launch.status_of(job)


def make_parser() -> argparse.ArgumentParser:
    """The parser: what to measure, and all options of the launcher."""
    parser = argparse.ArgumentParser(
        prog="horovod bench",
        description="Measures allreduce on this machine, in turns with a bare one through shared "
        "memory: the limit. Needs no framework.",
        usage="%(prog)s [-np N] [options]",
    )
    group = parser.add_argument_group("What to measure")
    group.add_argument(
        "--sizes",
        nargs="*",
        type=_size,
        default=SIZES_BYTES,
        metavar="BYTES",
        help="sizes of single tensors, such as 4 16K 64M; nothing for none",
    )
    group.add_argument(
        "--sets",
        nargs="*",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help=f"gradients of these models, tensor by tensor: {', '.join(MODELS)}; nothing for none",
    )
    group.add_argument(
        "--seconds",
        type=_seconds,
        default=2.0,
        help="how long to time the calls of each in all, about; 2",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to a file")
    launch.add_options(parser, without={"check_build"})
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line; one rank for each slot of the hosts, or each usable core, if no -np.

    Raises:
        ValueError: what was given is out of range, or there is nothing to measure.
        SystemExit: the command line can't be understood (status 2), or help was asked for.
    """
    args = make_parser().parse_args(argv)
    launch.finish_args(args)
    if not args.sizes and not args.sets:
        raise launch.UsageError("nothing to measure: give --sizes or --sets")
    if args.num_proc is None:
        hosts = launch.named_hosts(args)
        slots = sum(host.slots for host in hosts) if hosts else placement.usable_cores()
        args.num_proc = slots
    return args


def _points(args: argparse.Namespace) -> list[Point]:
    singles = [Point(size_text(size), [size // 4]) for size in dict.fromkeys(args.sizes)]
    return singles + [Point(name, MODELS[name]()) for name in dict.fromkeys(args.sets)]


def _size(text: str) -> int:
    found = _NUMBER.fullmatch(text)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 4 <= size <= _MOST_BYTES or size % 4:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a multiple of 4 up to {_MOST_BYTES >> 30}G is accepted, such as 16K"
        )
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a number above 0 and up to {_MOST_SECONDS} is accepted"
        )
    return seconds


def _try_to_write(path: Path) -> None:
    """Finds out before anything is measured whether the file can be written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise launch.UsageError(f"--json {path}: {error.strerror}") from error
