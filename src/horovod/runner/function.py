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
from dataclasses import dataclass
from typing import Any

import cloudpickle

from horovod.common.config import KNOBS
from horovod.common.store import StoreServer
from horovod.runner import launch, run_task
from horovod.runner.driver import JobSpec, Outcome, run_job
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
    spec = launch.job_spec(namespace, task_argv(executable), foreground=False)
    try:
        done = call(spec, func, args, kwargs)
    except (LaunchError, OSError) as error:
        raise RuntimeError(f"the job could not be started: {error}") from error
    if done.outcome.code:
        raise RuntimeError(_failure_text(done.outcome, done.traces))
    return results_of(done, len(spec.slots))


def task_argv(executable: str | None = None) -> list[bytes]:
    """The command that :func:`call` needs a job to run in every rank."""
    task = os.path.abspath(run_task.__file__)
    return [os.fsencode(word) for word in (executable or sys.executable, "-u", task)]


@dataclass(frozen=True)
class Called:
    """How the calls ended: pickled results and traces of exceptions by rank, where there are."""

    outcome: Outcome
    results: dict[int, bytes]
    traces: dict[int, str]


def call(
    spec: JobSpec, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Called:
    """Runs a job whose command is :func:`task_argv` and has every rank call ``func``.

    Raises:
        ValueError: the function or its arguments can't be pickled.
        LaunchError, OSError: the job could not be started.
    """
    # The path first and apart: it is needed before anything of the caller's can be unpickled.
    path = [os.path.abspath(entry) for entry in sys.path]
    try:
        pickled = cloudpickle.dumps((func, tuple(args), dict(kwargs)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"the function or its arguments can't be pickled: {error}") from error
    results: dict[int, bytes] = {}
    traces: dict[int, str] = {}

    def offer(server: StoreServer) -> None:
        server.set("func", pickle.dumps((path, pickled)))

    def collect(server: StoreServer) -> None:
        for rank in range(len(spec.slots)):
            result, trace = server.pop(f"result/{rank}"), server.get(f"trace/{rank}")
            if result is not None:
                results[rank] = result
            if trace is not None:
                traces[rank] = trace.decode("utf-8", "replace")

    return Called(run_job(spec, offer, collect), results, traces)


def _failure_text(outcome: Outcome, traces: Mapping[int, str]) -> str:
    if outcome.rank is None or outcome.rank not in traces:
        return outcome.text
    return f"{outcome.text}\nRank {outcome.rank} raised:\n{traces[outcome.rank]}"


def results_of(done: Called, size: int) -> list[Any]:
    """The results by rank; takes them out of ``done``.

    Raises:
        RuntimeError: a rank ended normally without one.
    """
    missing = [rank for rank in range(size) if rank not in done.results]
    if missing:
        raise RuntimeError(f"ranks {missing} ended normally, but without a result (os._exit?)")
    # One by one, so that no more than one large result is there twice.
    return [pickle.loads(done.results.pop(rank)) for rank in range(size)]
