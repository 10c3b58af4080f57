"""What the simulation of the control plane cannot see: names, sets and time of real engines."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from .engines import ALLREDUCE, BROADCAST, JOIN, Failed, Rank, default_plan, engines, run

HOG = 1 << 23  # float32 elements: long enough to be in flight while other calls are made


def test_a_forgotten_id_is_repeated_and_later_joins_go_on() -> None:
    """A coordinator that asks again for a call counts the answer: nothing may overtake it."""
    with engines(2, default_plan(cache_capacity=1)) as ranks:

        def body(rank: Rank) -> int:
            own = rank.add_set([0])
            x = np.ones(4, np.float32)
            rank.allreduce("a", x)
            rank.barrier("one")
            if rank.rank == 0:
                rank.allreduce("x", x, set_id=own)  # takes the one place of the coordinator's table
            rank.barrier("two")
            assert (rank.allreduce("a", x) == 2).all()
            return int(rank.call(JOIN, "join", []).value)

        joined = run(ranks, body)
        assert joined[0] == joined[1]


def test_a_set_may_go_while_its_agreed_calls_wait_for_their_turn() -> None:
    for _ in range(5):
        with engines(2, default_plan(fusion_threshold_bytes=0)) as ranks:

            def body(rank: Rank) -> list[str]:
                own = rank.add_set([0])
                big = np.ones(HOG, np.float32)
                outs = [np.empty_like(big) for _ in range(4)]
                rank.barrier("start")
                handles = [rank.submit(ALLREDUCE, f"all{i}", [big], [outs[i]]) for i in range(3)]
                if rank.rank == 0:
                    handles.append(rank.submit(ALLREDUCE, "own", [big], [outs[3]], set_id=own))
                handles.append(rank.engine.remove_process_set(own))
                ends = []
                for handle in handles:
                    try:
                        rank.finish(handle)
                        ends.append("ok")
                    except Failed as error:
                        ends.append(error.text)
                return ends

            for rank, ends in enumerate(run(ranks, body)):
                assert ends[:3] == ["ok"] * 3 and ends[-1] == "ok", (rank, ends)
                assert all(end == "ok" or "removed" in end for end in ends), (rank, ends)


@pytest.mark.parametrize("length", [64 << 10, (64 << 10) + 1, 1 << 20])
def test_a_name_too_long_is_refused_at_the_call(length: int) -> None:
    with engines(2) as ranks:

        def body(rank: Rank) -> None:
            x = np.ones(4, np.float32)
            if length <= 64 << 10:
                assert (rank.allreduce("n" * length, x) == 2).all()
            else:
                with pytest.raises(ValueError, match="too long"):
                    rank.allreduce("n" * length, x)
                rank.engine.reject(ALLREDUCE, "n" * length, 0, "nobody hears of it")
            assert (rank.allreduce("usable", x) == 2).all()

        run(ranks, body)


def test_who_drives_changes_no_bit() -> None:
    """A caller's flush-to-zero must not reach the arithmetic, whichever thread does it."""
    torch = pytest.importorskip("torch")
    subnormal = np.full(64, 70000, np.uint32).view(np.float32)
    assert torch.set_flush_denormal(True)
    try:
        with engines(1) as (rank,):
            polled, waited = np.zeros_like(subnormal), np.zeros_like(subnormal)
            handle = rank.submit(ALLREDUCE, "a", [subnormal], [polled], postscale=1.5)
            deadline = time.monotonic() + 10
            while not rank.engine.poll(handle):
                assert time.monotonic() < deadline
            rank.finish(rank.submit(ALLREDUCE, "b", [subnormal], [waited], postscale=1.5))
    finally:
        torch.set_flush_denormal(False)
    assert (waited.view(np.uint32) == 105000).all()
    assert (polled.view(np.uint32) == 105000).all()


def test_a_cycle_time_is_waited_even_by_blocked_callers() -> None:
    with engines(2, default_plan(cycle_time_us=60_000)) as ranks:

        def body(rank: Rank) -> float:
            x = np.ones(4, np.float32)
            rank.allreduce("a", x)
            start = time.monotonic()
            rank.allreduce("a", x)
            return time.monotonic() - start

        assert min(run(ranks, body)) >= 0.04


def test_a_stuck_caller_keeps_its_time_limit_while_others_stream() -> None:
    """Passes that keep moving other calls must not hold a waiting caller past its own limit."""
    with engines(2) as ranks:
        stop = threading.Event()

        def body(rank: Rank) -> float:
            big = np.ones(HOG // 8, np.float32)
            out = np.empty_like(big)

            def stream() -> None:
                step = 0
                while True:
                    go_on = not stop.is_set() if rank.rank == 0 else True
                    flag = np.array([float(go_on)], np.float32)
                    if rank.allreduce(f"go{step % 2}", flag)[0] < 2:
                        return
                    rank.call(ALLREDUCE, f"s{step % 2}", [big], [out])
                    step += 1

            def always_on() -> None:
                stream()

            thread = threading.Thread(target=always_on, daemon=True)
            thread.start()
            waited = 0.0
            if rank.rank == 0:
                x = np.ones(1, np.float32)
                handle = rank.submit(ALLREDUCE, "stuck", [x], [x.copy()])
                start = time.monotonic()
                assert not rank.engine.wait(handle, 0.3)
                waited = time.monotonic() - start
                stop.set()
            thread.join(30)
            assert not thread.is_alive()
            if rank.rank == 0:
                rank.finish(handle)
            else:
                rank.allreduce("stuck", np.ones(1, np.float32))
            return waited

        assert run(ranks, body)[0] < 3.0


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("differ", ["set", "operation"])
def test_one_call_made_differently_is_a_disagreement(differ: str, unnamed: bool) -> None:
    """Another process set or operation under one name, or none: an error, and all goes on."""
    with engines(3) as ranks:

        def body(rank: Rank) -> float:
            pair = rank.add_set([0, 1])
            odd = rank.rank == 0
            kind = BROADCAST if odd and differ == "operation" else ALLREDUCE
            prefix = "broadcast" if kind == BROADCAST else "allreduce"
            name = f"{prefix}.noname.{0 if odd else 1}" if unnamed else f"{prefix}.a"
            x = np.ones(4, np.float32)
            start = time.monotonic()
            with pytest.raises(Failed, match="ranks made different calls") as caught:
                rank.call(
                    kind,
                    name,
                    [x],
                    [x.copy()],
                    set_id=pair if odd and differ == "set" else 0,
                    unnamed=unnamed,
                )
            assert caught.value.kind == 2
            waited = time.monotonic() - start
            assert (rank.allreduce("after", x) == 3).all()
            return waited

        assert max(run(ranks, body)) < 5.0
