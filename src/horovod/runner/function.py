"""Runs a function in every rank: what goes to the workers and what comes back; no process here.

Function and results are pickled, and travel through the store only, between proved members.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from horovod.common.config import KNOBS
from horovod.common.store import StoreServer
from horovod.runner import launch, run_task
from horovod.runner.driver import Outcome, run_job
from horovod.runner.placement import LaunchError


def run(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, object],
    executable: str | None,
) -> list[Any]:
    """Runs ``func`` in new processes and returns its results by rank; see ``horovod.run``."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise RuntimeError("this process ignores SIGCHLD and so can't see how its workers end")
    namespace = argparse.Namespace(**{knob.name: None for knob in KNOBS})
    vars(namespace).update(options, from_file=frozenset())
    launch.check_numbers(namespace)
    task = os.path.abspath(run_task.__file__)
    argv = [os.fsencode(word) for word in (executable or sys.executable, "-u", task)]
    spec = launch.job_spec(namespace, argv, foreground=False)
    size = len(spec.slots)
    # The path first and apart: it is needed before anything of the caller's can be unpickled.
    path = [os.path.abspath(entry) for entry in sys.path]
    try:
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"the function or its arguments can't be pickled: {error}") from error
    results: dict[int, bytes] = {}
    traces: dict[int, str] = {}

    def offer(server: StoreServer) -> None:
        server.set("func", pickle.dumps((path, call)))

    def collect(server: StoreServer) -> None:
        for rank in range(size):
            result, trace = server.pop(f"result/{rank}"), server.get(f"trace/{rank}")
            if result is not None:
                results[rank] = result
            if trace is not None:
                traces[rank] = trace.decode("utf-8", "replace")

    try:
        outcome = run_job(spec, offer, collect)
    except (LaunchError, OSError) as error:
        raise RuntimeError(f"the job could not be started: {error}") from error
    if outcome.code:
        raise RuntimeError(_failure_text(outcome, traces))
    return _results(size, results)


def _failure_text(outcome: Outcome, traces: Mapping[int, str]) -> str:
    if outcome.rank is None or outcome.rank not in traces:
        return outcome.text
    return f"{outcome.text}\nRank {outcome.rank} raised:\n{traces[outcome.rank]}"


def _results(size: int, results: dict[int, bytes]) -> list[Any]:
    missing = [rank for rank in range(size) if rank not in results]
    if missing:
        raise RuntimeError(f"ranks {missing} ended normally, but without a result (os._exit?)")
    # One by one, so that no more than one large result is there twice.
    return [pickle.loads(results.pop(rank)) for rank in range(size)]
