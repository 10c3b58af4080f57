"""How engines end: in good order, for a reason, by death, by silence, by disagreement, in a fork.

Knows engines wired as threads; what their calls do is test_engine.py's.
"""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from horovod import _core

from .engines import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    DEADLINE_S,
    JOIN,
    REDUCESCATTER,
    Failed,
    Rank,
    default_plan,
    engines,
    run,
)

PEER_LOST, TIMEOUT, SHUTDOWN = 3, 4, 5
NOTICE_S = 1.0  # a death is known everywhere after this long


def ones(count: int = 7) -> np.ndarray:
    return np.ones(count, np.float32)


def failure_of(rank: Rank, handle: int) -> Failed:
    with pytest.raises(Failed) as error:
        rank.finish(handle)
    return error.value


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_dead(rank: Rank, kind: int) -> None:
    """Every later call fails at once, and says why."""
    failure = rank.engine.failure()
    assert failure is not None and failure[0] == kind
    with pytest.raises(_core.Failure) as error:
        rank.submit(ALLREDUCE, "later", [ones()])
    assert error.value.args[0] == kind
    assert error.value.args[1]


# -------------------------------------------------------------------------------------------------
# Leaving


def test_shutdown_ends_the_own_calls_and_those_that_need_the_rank() -> None:
    with engines(3) as ranks:
        pair = run(ranks, lambda rank: rank.add_set([0, 2]))[0]
        pending = {r.rank: r.submit(ALLREDUCE, "x", [ones()]) for r in ranks[:2]}
        ranks[1].engine.shutdown("", 1.0)
        assert failure_of(ranks[1], pending[1]).kind == SHUTDOWN
        with pytest.raises(_core.Failure):
            ranks[1].submit(ALLREDUCE, "y", [ones()])

        text = failure_of(ranks[0], pending[0]).text
        assert "rank 1" in text and '"x"' in text, text
        # Whoever needs rank 1 learns that it has left; who doesn't, goes on.
        later = failure_of(ranks[2], ranks[2].submit(ALLREDUCE, "y", [ones()]))
        assert "rank 1" in later.text
        assert ranks[0].engine.failure() is ranks[2].engine.failure() is None
        together = [ranks[0], ranks[2]]
        for _ in range(3):
            out = run(together, lambda rank: rank.allreduce("x", ones(), set_id=pair))
            assert (out[0] == 2).all() and (out[1] == 2).all()


def test_shutdown_of_all_in_any_order_is_quick_and_finishes_what_was_agreed() -> None:
    with engines(4) as ranks:
        handles = run(ranks, lambda rank: rank.submit(ALLREDUCE, "x", [ones(300_000)]))
        start = time.monotonic()

        def body(rank: Rank) -> None:
            rank.finish(handles[rank.rank])
            rank.engine.shutdown("", 5.0)
            rank.engine.shutdown("", 5.0)  # idempotent
            rank.engine.shutdown("too late for a reason", 5.0)

        run(ranks, body)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("leaver", range(3))
def test_a_reason_reaches_all_peers(leaver: int) -> None:
    reason = "KeyError: 'batch_size'"
    with engines(3) as ranks:
        others = [r for r in ranks if r.rank != leaver]
        handles = {r.rank: r.submit(ALLREDUCE, "x", [ones()]) for r in others}
        idle = run(others, lambda rank: rank.engine.poll(handles[rank.rank]))
        assert idle == [False, False]
        ranks[leaver].engine.shutdown(reason, 1.0)
        for r in others:
            error = failure_of(r, handles[r.rank])
            assert (error.kind, error.rank) == (PEER_LOST, leaver)
            assert f"rank {leaver}" in error.text and reason in error.text
            check_dead(r, PEER_LOST)


def test_an_engine_destroyed_with_calls_in_flight() -> None:
    with engines(3) as ranks:
        handles = run(ranks, lambda rank: rank.submit(ALLREDUCE, "x", [ones(500_000)]))
        more = run(ranks[:2], lambda rank: rank.submit(ALLREDUCE, "y", [ones(500_000)]))
        ranks[2].engine = None
        gc.collect()
        for rank in ranks[:2]:
            error = failure_of(rank, more[rank.rank])
            assert (error.kind, error.rank) == (PEER_LOST, 2)
            # "x" may have got through before.
            assert rank.engine.wait(handles[rank.rank], DEADLINE_S)


# -------------------------------------------------------------------------------------------------
# Deaths

CALLS: dict[str, tuple[int, Callable[[], list[np.ndarray]]]] = {
    "allreduce": (ALLREDUCE, lambda: [ones()]),
    "a large allreduce": (ALLREDUCE, lambda: [ones(1_000_000)]),
    "allgather": (ALLGATHER, lambda: [ones()]),
    "broadcast": (BROADCAST, lambda: [ones()]),
    "alltoall": (ALLTOALL, lambda: [ones(6)]),
    "reducescatter": (REDUCESCATTER, lambda: [ones()]),
    "barrier": (BARRIER, list),
    "join": (JOIN, list),
}


@pytest.mark.parametrize(("n", "lost"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("what", CALLS)
def test_a_death_is_an_error_for_all_in_time(what: str, n: int, lost: int) -> None:
    kind, arrays = CALLS[what]
    with engines(n, breakable=True) as ranks:
        others = [r for r in ranks if r.rank != lost]
        barrier = threading.Barrier(n)

        def body(rank: Rank) -> float:
            handle = rank.submit(kind, "x", arrays())
            barrier.wait(DEADLINE_S)
            error = failure_of(rank, handle)
            ended = time.monotonic()
            assert error.kind == PEER_LOST
            assert '"x"' in error.text and f"(host, pid {error.rank})" in error.text
            # Of three, the one cut off lives on here and tells the others that they are dead.
            assert error.rank == lost or n == 3
            return ended

        died: list[float] = []

        def kill() -> None:
            barrier.wait(DEADLINE_S)
            died.append(time.monotonic())
            ranks[lost].cut()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        ended = run(others, body)
        killer.join(DEADLINE_S)
        assert max(ended) - died[0] < NOTICE_S
        for r in others:
            check_dead(r, PEER_LOST)


@pytest.mark.parametrize("lost", range(2))
def test_a_death_is_noticed_by_those_who_sleep(lost: int) -> None:
    with engines(2, breakable=True) as ranks:
        run(ranks, lambda rank: rank.barrier())
        other = ranks[1 - lost]
        fd = other.engine.message_fd()
        ranks[lost].cut()
        readable, _, _ = select.select([fd], [], [], NOTICE_S)
        assert readable, "nobody calls, and the engine says nothing"
        check_dead(other, PEER_LOST)


# -------------------------------------------------------------------------------------------------
# Plans


@pytest.mark.parametrize(
    "change",
    [
        {"segment_bytes": 4096},
        {"direct_bytes": 64},
        {"fusion_threshold_bytes": 1},
        {"cache_capacity": 3},
        {"join_all_ops": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_ranks_with_different_plans_never_run_an_entry(change: dict[str, int]) -> None:
    plans = [default_plan(), default_plan(), default_plan(**change)]

    def body(rank: Rank) -> Failed:
        return failure_of(rank, rank.submit(ALLREDUCE, "x", [ones(50_000)]))

    with engines(3, plans=plans) as ranks:
        errors = run(ranks, body)
        assert {e.kind for e in errors} == {PEER_LOST}
        assert "another plan" in errors[2].text


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("plan", {"segment_bytes": 0}),
        ("plan", {"outbox_bytes": 100}),
        ("plan", {"unheard_of": 1}),
        ("options", {"simd": "mmx"}),
        ("options", {"stores": "fast"}),
        ("options", {"unheard_of": 1}),
    ],
)
def test_a_plan_or_option_that_makes_no_sense(what: str, change: dict[str, Any]) -> None:
    plan, options = default_plan(), {}
    (plan if what == "plan" else options).update(change)
    links = {"segments": [-1], "doorbells": [-1], "sockets": [-1], "pidfds": [-1]}
    with pytest.raises(ValueError, match=r"\w"):
        _core.Engine(0, 1, ["host, pid 0"], links, plan, options)


# -------------------------------------------------------------------------------------------------
# Forks


def in_a_fork(body: Callable[[], None]) -> None:
    """Runs `body` in a forked child, whose end is awaited with a deadline."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    pidfd = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([pidfd], [], [], DEADLINE_S)
        if not readable:
            os.kill(pid, 9)
        _, status = os.waitpid(pid, 0)
        assert readable and os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(pidfd)


def open_files() -> set[tuple[str, str]]:
    """Descriptors and what they are of; compared by what is new, as earlier tests' may close."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def test_a_forked_child_has_no_engine_and_disturbs_nobody() -> None:
    files = open_files()
    with engines(2) as ranks:
        run(ranks, lambda rank: rank.barrier())
        pending = ranks[0].submit(ALLREDUCE, "x", [ones()])
        stop = threading.Event()

        def keep_busy(rank: Rank) -> None:  # so that locks are held when the fork happens
            while not stop.is_set():
                rank.engine.pending()

        busy = [threading.Thread(target=keep_busy, args=(r,), daemon=True) for r in ranks]
        for t in busy:
            t.start()

        def child() -> None:
            for rank in ranks:
                rank.engine.abandon()
            assert open_files() <= files, "a child keeps its parent's connections open"
            for use in (
                lambda e: e.poll(pending),
                lambda e: e.wait(pending, 1.0),
                lambda e: e.take(pending),
                lambda e: e.submit(BARRIER, "b", 0, [], 1, 1.0, 1.0, 0, None, False, None),
                lambda e: e.add_process_set([0]),
            ):
                with pytest.raises(_core.Failure) as error:
                    use(ranks[0].engine)
                assert error.value.args[0] == SHUTDOWN
            assert ranks[0].engine.failure()[0] == SHUTDOWN
            ranks[0].engine.reject(ALLREDUCE, "x", 0, "nobody hears this")
            ranks[0].engine.shutdown("nor this", 1.0)
            for rank in ranks:
                rank.engine = None
            gc.collect()

        try:
            for _ in range(5):
                in_a_fork(child)
        finally:
            stop.set()
            for t in busy:
                t.join(DEADLINE_S)
        other = ranks[1].submit(ALLREDUCE, "x", [ones()])
        ranks[0].finish(pending)
        ranks[1].finish(other)
    for rank in ranks:
        rank.engine = None
    assert open_files() <= files


# -------------------------------------------------------------------------------------------------
# Stalls and deadlocks


def next_messages(rank: Rank, timeout_s: float) -> list[tuple[int, str]]:
    readable, _, _ = select.select([rank.engine.message_fd()], [], [], timeout_s)
    return rank.engine.take_messages() if readable else []


def test_a_stall_is_warned_of_once_and_its_end_is_told() -> None:
    with engines(3, options={"stall_warning_s": 0.3, "deadlock_s": 0.0}) as ranks:
        run(ranks, lambda rank: rank.allreduce("before", ones()))
        handles = [r.submit(ALLREDUCE, "x", [ones()]) for r in ranks[:2]]
        start = time.monotonic()
        ((level, text),) = next_messages(ranks[0], 10)
        assert 0.25 < time.monotonic() - start < 5
        assert level == 30
        for word in ["x", "rank 2", "host, pid 2"]:
            assert word in text, text
        assert next_messages(ranks[0], 0.8) == []
        handles.append(ranks[2].submit(ALLREDUCE, "x", [ones()]))
        for rank, handle in zip(ranks, handles, strict=True):
            rank.finish(handle)  # the stall was only a stall
        ((level, text),) = next_messages(ranks[0], 10)
        assert level == 20 and "x" in text
        run(ranks, lambda rank: rank.barrier())


def test_a_stall_ends_the_job_if_asked() -> None:
    # Far longer than the second submit can be late on a busy machine.
    options = {"stall_warning_s": 0.2, "stall_shutdown_s": 2.0, "deadlock_s": 0.0}
    with engines(3, options=options) as ranks:
        handles = [r.submit(ALLREDUCE, "x", [ones()]) for r in ranks[1:]]
        for rank, handle in zip(ranks[1:], handles, strict=True):
            error = failure_of(rank, handle)
            assert error.kind == TIMEOUT
            assert "x" in error.text and "rank 0" in error.text
        until(lambda: ranks[0].engine.failure() is not None)  # nothing of its own waits for it
        for rank in ranks:
            check_dead(rank, TIMEOUT)


def test_stalls_arent_checked_if_not_wanted() -> None:
    options = {"stall_warning_s": 0.1, "stall_shutdown_s": 0.2, "deadlock_s": 0.0, "stall_check": 0}
    with engines(2, options=options) as ranks:
        handle = ranks[0].submit(ALLREDUCE, "x", [ones()])
        assert next_messages(ranks[0], 0.6) == []
        other = ranks[1].submit(ALLREDUCE, "x", [ones()])
        ranks[0].finish(handle)
        ranks[1].finish(other)


def test_ranks_that_wait_for_each_other_are_told_who_waits_for_what() -> None:
    with engines(3, options={"deadlock_s": 0.4}) as ranks:
        start = time.monotonic()

        def body(rank: Rank) -> Failed:
            name = "left" if rank.rank == 0 else "right"
            return failure_of(rank, rank.submit(ALLREDUCE, name, [ones()]))

        for error in run(ranks, body):
            assert error.kind == TIMEOUT
            for word in ["left", "right", "rank 0", "pid 2"]:
                assert word in error.text, error.text
        assert time.monotonic() - start < 5


def test_a_rank_that_works_on_its_own_is_no_deadlock() -> None:
    with engines(2, options={"deadlock_s": 0.2}) as ranks:
        handle = ranks[0].submit(ALLREDUCE, "x", [ones()])
        assert not ranks[0].engine.wait(handle, 0.8)  # rank 1 is busy elsewhere
        other = ranks[1].submit(ALLREDUCE, "x", [ones()])
        ranks[0].finish(handle)
        ranks[1].finish(other)
