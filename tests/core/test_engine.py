"""What calls on engines promise: agreement, joins, process sets, order, threads, handles, waiting.

Knows engines wired as threads; how engines end and die is test_engine_ends.py's.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .engines import (
    ADASUM,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    AVERAGE,
    BARRIER,
    BROADCAST,
    JOIN,
    MAX,
    MIN,
    PRODUCT,
    REDUCESCATTER,
    SUM,
    Failed,
    Rank,
    default_plan,
    engines,
    run,
)

INVALID, MISMATCH = 1, 2


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def expect_sum(rank: Rank, name: str, n: int, **kwargs: Any) -> None:
    assert rank.allreduce(name, ones(7), **kwargs).tolist() == [float(n)] * 7


# -------------------------------------------------------------------------------------------------
# Wrong calls


def test_a_name_in_flight_is_refused_at_that_call_only() -> None:
    with engines(2) as (first, second):
        handle = first.submit(ALLREDUCE, "x", [ones(3)])
        for kind in (ALLREDUCE, BROADCAST):
            with pytest.raises(ValueError, match=r'"x".*in flight'):
                first.submit(kind, "x", [ones(3)])
        other = second.submit(ALLREDUCE, "x", [ones(3)])
        for rank, h in ((first, handle), (second, other)):
            out = np.from_dlpack(rank.finish(h).outputs[0])
            assert out.tolist() == [2, 2, 2]
        run([first, second], lambda rank: expect_sum(rank, "x", 2))  # and free again


def call(kind: int, *arrays: np.ndarray, **kwargs: Any) -> dict[str, Any]:
    return {"kind": kind, "arrays": list(arrays), **kwargs}


DISAGREEMENTS = {  # what the last rank does, what the others do, words that the error must have
    "dtype": (
        call(ALLREDUCE, ones(4, dtype=np.float16)),
        call(ALLREDUCE, ones(4)),
        ["float16", "float32"],
    ),
    "shape": (call(ALLREDUCE, ones(4)), call(ALLREDUCE, ones(2, 3)), ["[4]", "[2, 3]"]),
    "rank of shape": (call(ALLREDUCE, ones(6)), call(ALLREDUCE, ones(6, 1)), ["[6]", "[6, 1]"]),
    "operation": (call(BROADCAST, ones(4)), call(ALLREDUCE, ones(4)), ["broadcast", "allreduce"]),
    "reduce op": (
        call(ALLREDUCE, ones(4), op=MAX),
        call(ALLREDUCE, ones(4), op=AVERAGE),
        ["Max", "Average"],
    ),
    "prescale": (
        call(ALLREDUCE, ones(4), prescale=0.25),
        call(ALLREDUCE, ones(4), prescale=0.5),
        ["0.25", "0.5"],
    ),
    "postscale": (
        call(ALLREDUCE, ones(4), postscale=3.0),
        call(ALLREDUCE, ones(4)),
        ["3", "1"],
    ),
    "root": (call(BROADCAST, ones(4), root=1), call(BROADCAST, ones(4)), ["1", "0"]),
    "number of tensors": (
        call(ALLREDUCE, ones(4), ones(4)),
        call(ALLREDUCE, ones(4)),
        ["1", "2"],
    ),
    "a later tensor": (
        call(ALLREDUCE, ones(4), ones(5)),
        call(ALLREDUCE, ones(4), ones(6)),
        ["[5]", "[6]"],
    ),
    "row of a gather": (
        call(ALLGATHER, ones(4, 3)),
        call(ALLGATHER, ones(9, 2)),
        ["3", "2"],
    ),
    "row of an alltoall": (
        call(ALLTOALL, ones(6, 3)),
        call(ALLTOALL, ones(6, 2)),
        ["3", "2"],
    ),
    "rows of a reducescatter": (
        call(REDUCESCATTER, ones(4, 3)),
        call(REDUCESCATTER, ones(5, 3)),
        ["[4, 3]", "[5, 3]"],
    ),
    "barrier": (call(BARRIER), call(ALLREDUCE, ones(4)), ["barrier", "allreduce"]),
}


@pytest.fixture(scope="module")
def three() -> Any:
    with engines(3) as ranks:
        yield ranks


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_an_error_everywhere_and_disturbs_nothing(
    three: list[Rank], what: str
) -> None:
    odd, common, words = DISAGREEMENTS[what]

    def body(rank: Rank) -> str:
        mine = dict(odd if rank.rank == 2 else common)
        kind, arrays = mine.pop("kind"), mine.pop("arrays")
        neighbour = rank.submit(ALLREDUCE, "neighbour", [ones(7)])
        start = time.monotonic()
        with pytest.raises(Failed) as error:
            rank.call(kind, "x", arrays, **mine)
        assert time.monotonic() - start < 5
        assert error.value.kind == MISMATCH
        rank.finish(neighbour)
        expect_sum(rank, "x", 3)  # the name is free, also in what the engine remembers of it
        expect_sum(rank, "x", 3)
        return error.value.text

    for r, text in enumerate(run(three, body)):
        assert text.startswith(f"[horovod {r}/3] "), text
        for word in [*words, '"x"', "rank 2"]:
            assert word in text, (word, text)


WRONG = {  # calls that are wrong by themselves
    "0-d allgather": call(ALLGATHER, ones()),
    "0-d alltoall": call(ALLTOALL, ones()),
    "0-d reducescatter": call(REDUCESCATTER, ones()),
    "average of bool": call(ALLREDUCE, ones(4, dtype=np.bool_), op=AVERAGE),
    "minimum of complex": call(ALLREDUCE, ones(4, dtype=np.complex64), op=MIN),
    "maximum of complex": call(REDUCESCATTER, ones(4, dtype=np.complex128), op=MAX),
    "not an operation of ours": call(ALLREDUCE, ones(4), op=6),
    "adasum of integers": call(ALLREDUCE, ones(4, dtype=np.int32), op=ADASUM),
    "adasum in a reducescatter": call(REDUCESCATTER, ones(6), op=ADASUM),
    "no tensors": call(ALLREDUCE),
    "root outside": call(BROADCAST, ones(4), root=3),
    "root below": call(BROADCAST, ones(4), root=-1),
    "uneven alltoall without splits": call(ALLTOALL, ones(4)),
    "splits beyond the rows": call(ALLTOALL, ones(4), splits=[2, 2, 1]),
    "a negative split": call(ALLTOALL, ones(4), splits=[2, -1, 3]),
    "too few splits": call(ALLTOALL, ones(4), splits=[2, 2]),
    "two tensors to alltoall": call(ALLTOALL, ones(3), ones(3)),
    "no such dtype": call(ALLREDUCE, ones(4), dtypes=[13]),
    "no such call": call(9, ones(4)),
    "no such set": call(ALLREDUCE, ones(4), set_id=77),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_raises_there_before_anything_is_sent(three: list[Rank], what: str) -> None:
    wrong = dict(WRONG[what])
    kind, arrays = wrong.pop("kind"), wrong.pop("arrays")
    names_nobody = what.startswith("no such") or what == "not an operation of ours"

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(ValueError, match=r"\S"):
                rank.submit(kind, "x", arrays, **wrong)
        elif not names_nobody:
            # The others made the matching call: they learn of it, and that it was rank 1's.
            with pytest.raises(Failed, match=r'"x".*rank 1') as error:
                rank.call(ALLREDUCE, "x", [ones(4)])
            assert error.value.kind == MISMATCH
        rank.barrier()
        expect_sum(rank, "x", 3)

    run(three, body)


def test_a_rejected_call_is_an_error_for_the_others(three: list[Rank]) -> None:
    def body(rank: Rank) -> None:
        for round_ in range(3):
            if rank.rank == round_:
                rank.engine.reject(ALLGATHER, "x", 0, "a tensor on a device we don't know")
            else:
                with pytest.raises(Failed) as error:
                    rank.call(ALLGATHER, "x", [ones(4)])
                assert error.value.kind == MISMATCH
                assert f"rank {round_}" in error.value.text
                assert "a device we don't know" in error.value.text
            rank.barrier()
        expect_sum(rank, "x", 3)

    run(three, body)


# -------------------------------------------------------------------------------------------------
# Joins


def test_joined_ranks_are_left_out_and_averages_divide_by_size() -> None:
    n = 3
    values = [np.array([3.0, -8.0, 5.0]), np.array([1.0, 6.0, -7.0]), np.array([9.0, 2.0, 4.0])]

    def body(rank: Rank) -> int:
        # Rank r makes r + 1 rounds, so the ranks from r on take part in round r.
        for round_ in range(rank.rank + 1):
            terms = values[round_:]
            mine = values[rank.rank]
            total = sum(terms[1:], terms[0])
            assert (rank.allreduce("x", mine, op=SUM) == total).all()
            average = rank.allreduce("a", mine.astype(np.float32), op=AVERAGE)
            assert (average == total.astype(np.float32) * np.float32(1 / n)).all()
            ints = rank.allreduce("i", mine.astype(np.int64), op=AVERAGE)
            assert ints.tolist() == np.trunc(total / n).tolist()
            assert (rank.allreduce("m", mine, op=MIN) == np.min(terms, axis=0)).all()
            assert (rank.allreduce("p", mine, op=PRODUCT) == np.prod(terms, axis=0)).all()
            large = np.full(100_000, rank.rank + 1.0)
            assert (rank.allreduce("l", large) == sum(range(round_ + 1, n + 1))).all()
        return rank.join()

    with engines(n) as ranks:
        for _ in range(3):
            assert len(set(run(ranks, body))) == 1  # all are told the same last rank
            run(ranks, lambda rank: expect_sum(rank, "x all", n))


def test_the_last_to_join_is_told() -> None:
    with engines(3) as ranks:
        for last in range(3):
            early = [r for r in ranks if r.rank != last]
            handles = {r.rank: r.submit(JOIN, "join", []) for r in early}
            # Done once the others have joined: the allreduce leaves them out.
            assert ranks[last].allreduce("alone", ones(2)).tolist() == [1, 1]
            handles[last] = ranks[last].submit(JOIN, "join", [])
            assert [r.finish(handles[r.rank]).value for r in ranks] == [last] * 3


@pytest.mark.parametrize(
    ("kind", "array"),
    [(ALLGATHER, ones(2)), (BROADCAST, ones(2)), (ALLTOALL, ones(4)), (REDUCESCATTER, ones(4))],
)
def test_after_a_join_other_collectives_are_errors(kind: int, array: np.ndarray) -> None:
    with engines(2) as (first, second):
        joined = first.submit(JOIN, "join", [])
        with pytest.raises(Failed, match=r"rank 0.*joined") as error:
            second.call(kind, "x", [array], root=1)
        assert error.value.kind == MISMATCH
        last = second.submit(JOIN, "join", [])
        assert first.finish(joined).value == second.finish(last).value == 1


def test_or_joined_ranks_have_no_rows_if_the_plan_says_so() -> None:
    with engines(3, default_plan(join_all_ops=1)) as ranks:
        joined = ranks[0].submit(JOIN, "join", [])

        def body(rank: Rank) -> None:
            rows = np.full((2, 2), rank.rank, np.int32)
            gathered = rank.call(ALLGATHER, "g", [rows])
            assert np.from_dlpack(gathered.outputs[0])[:, 0].tolist() == [1, 1, 2, 2]
            sent = rank.call(ALLTOALL, "t", [np.arange(3) + 10 * rank.rank], splits=[1, 1, 1])
            assert np.from_dlpack(sent.outputs[0]).tolist() == [10 + rank.rank, 20 + rank.rank]
            assert sent.splits == [0, 1, 1]
            scattered = rank.call(REDUCESCATTER, "r", [np.arange(6)])
            mine = [4, 6] if rank.rank == 1 else [8, 10]
            assert np.from_dlpack(scattered.outputs[0]).tolist() == mine
            with pytest.raises(Failed):
                rank.call(BROADCAST, "b", [ones(1)], root=0)
            rank.join()

        run(ranks[1:], body)
        ranks[0].finish(joined)


# -------------------------------------------------------------------------------------------------
# Process sets


def test_disjoint_sets_dont_wait_for_each_other() -> None:
    with engines(4) as ranks:
        pairs = [[0, 1], [2, 3]]
        ids = run(ranks, lambda rank: [rank.add_set(pair) for pair in pairs])[0]
        for here in (0, 1):  # while the other pair does nothing at all
            members = [ranks[r] for r in pairs[here]]
            for count in (3, 50_000):

                def body(rank: Rank, here: int = here, count: int = count) -> None:
                    for k in range(20):
                        out = rank.allreduce(f"x{k}", ones(count), set_id=ids[here])
                        assert (out == 2).all()
                    rank.barrier(set_id=ids[here])

                run(members, body)


@pytest.mark.parametrize("seed", range(3))
def test_overlapping_sets_in_any_order(seed: int) -> None:
    members = {"a": [0, 1], "b": [1, 2], "c": [0, 2], "d": [0, 1, 2, 3], "e": [0, 3], "f": [2, 3]}

    def body(rank: Rank) -> None:
        ids = {key: rank.add_set(ranks) for key, ranks in members.items() if key != "d"}
        ids["d"] = 0
        calls = [
            (key, k, count)
            for key, ranks in members.items()
            if rank.rank in ranks
            for k, count in enumerate([1, 5000, 300, 40_000])
        ]
        random.Random(seed * 10 + rank.rank).shuffle(calls)
        handles = []
        for key, k, count in calls:
            out = np.empty(count)
            array = np.full(count, 1.0 + rank.rank)
            handle = rank.submit(ALLREDUCE, f"{key}{k}", [array], [out], set_id=ids[key])
            handles.append((handle, out, sum(1.0 + r for r in members[key])))
        for handle, out, total in handles:
            rank.finish(handle)
            assert (out == total).all()

    with engines(4, default_plan(segment_bytes=1024, outbox_bytes=16384)) as ranks:
        run(ranks, body)


def test_sets_come_and_go() -> None:
    def body(rank: Rank) -> None:
        n = rank.size
        first, second = rank.add_set([0, 2]), rank.add_set([1])
        assert first != second != 0
        assert rank.engine.process_sets() == {0: [0, 1, 2], first: [0, 2], second: [1]}
        with pytest.raises(Failed) as error:  # one set for the same ranks is enough
            rank.add_set([0, 2])
        assert error.value.kind == INVALID
        if rank.rank == 1:
            with pytest.raises(ValueError, match="no member"):
                rank.submit(ALLREDUCE, "x", [ones(7)], set_id=first)
            expect_sum(rank, "x", 1, set_id=second)
        else:
            expect_sum(rank, "x", 2, set_id=first)
            # A name belongs to its set.
            outer = rank.submit(ALLREDUCE, "x", [ones(7)])
            expect_sum(rank, "x", 2, set_id=first)
            rank.finish(outer)
        if rank.rank == 1:
            expect_sum(rank, "x", n)
        rank.remove_set(first)
        assert first not in rank.engine.process_sets()
        with pytest.raises(ValueError, match="no process set"):
            rank.submit(ALLREDUCE, "x", [ones(7)], set_id=first)
        with pytest.raises(Failed):
            rank.remove_set(first)
        again = rank.add_set([0, 2])
        assert again > second  # an id is never used twice
        if rank.rank != 1:
            expect_sum(rank, "x", 2, set_id=again)
        rank.barrier()

    with engines(3) as ranks:
        run(ranks, body)


def test_what_is_pending_in_a_removed_set_fails() -> None:
    with engines(2) as ranks:
        uid = run(ranks, lambda rank: rank.add_set([0]))[0]
        other = run(ranks, lambda rank: rank.add_set([1]))[0]
        both = [rank.engine.add_process_set([0, 1]) for rank in ranks]
        with pytest.raises(Failed):  # that is set 0
            ranks[0].finish(both[0])
        assert ranks[0].engine.process_sets() == {0: [0, 1], uid: [0], other: [1]}


def test_a_rejected_addition_of_a_set_counts_as_the_ranks_call(three: list[Rank]) -> None:
    def body(rank: Rank) -> None:
        for round_ in range(3):
            if rank.rank == round_:
                rank.engine.reject_process_set("no such rank")
            else:
                with pytest.raises(Failed, match=f"rank {round_}.*no such rank") as error:
                    rank.add_set([0, 1])
                assert error.value.kind == MISMATCH
            rank.engine.reject_process_set("everywhere")
            rank.remove_set(rank.add_set([0, 1]))

    run(three, body)


def test_sets_that_ranks_disagree_about() -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(Failed) as error:
            rank.add_set([0, 1] if rank.rank == 0 else [0, 2])
        assert error.value.kind == MISMATCH
        expect_sum(rank, "x", 3)

    with engines(3) as ranks:
        run(ranks, body)


# -------------------------------------------------------------------------------------------------
# Order and threads


def test_nobody_leaves_a_barrier_before_the_last_has_come() -> None:
    arrived = [0] * 4

    def body(rank: Rank) -> None:
        for round_ in range(50):
            arrived[rank.rank] = round_
            rank.barrier()
            assert min(arrived) >= round_

    with engines(4) as ranks:
        run(ranks, body)


def fused_results(threshold: int, seed: int) -> tuple[list[bytes], dict[str, int]]:
    """Results of a backward pass in an order of each rank's own, and rank 0's counters."""
    n, tensors = 3, 60
    sizes = [1, 3, 1000, 17, 60, 4096, 250, 7]
    draw = np.random.default_rng(5)
    inputs = [
        [draw.normal(size=sizes[k % 8]).astype(np.float32) for k in range(tensors)]
        for _ in range(n)
    ]

    def body(rank: Rank) -> list[bytes]:
        order = list(range(tensors))
        random.Random(seed * 100 + rank.rank).shuffle(order)
        results = [b""] * tensors
        for _ in range(2):  # in full, then by id
            outs = [np.empty_like(x) for x in inputs[rank.rank]]
            handles = {
                k: rank.submit(ALLREDUCE, f"x{k}", [inputs[rank.rank][k]], [outs[k]], op=AVERAGE)
                for k in order
            }
            for k in reversed(order):
                rank.finish(handles[k])
            results = [out.tobytes() for out in outs]
        return results

    plan = default_plan(fusion_threshold_bytes=threshold)
    with engines(n, plan) as ranks:
        results = run(ranks, body)
        assert results[0] == results[1] == results[2]
        return results[0], ranks[0].engine.counters()


def test_order_and_fusion_change_no_bit() -> None:
    whole = 128 << 20
    (alone, plain), *others = [
        fused_results(threshold, seed) for threshold in (0, 1024, whole) for seed in (1, 2)
    ]
    assert plain["fused_calls"] == 0 and plain["entries"] == plain["calls"]
    for results, _ in others:
        assert results == alone
    for _, counters in others[3:]:
        assert counters["fused_calls"] > 0
        assert counters["entries"] < counters["calls"]


def test_many_threads_of_each_rank_at_once() -> None:
    threads, rounds = 8, 30

    def work(rank: Rank, t: int, failures: list[BaseException]) -> None:
        try:
            for k in range(rounds):
                out = rank.allreduce(f"t{t}", np.full(50 + t, float(k), np.float32))
                assert (out == 2 * k).all() and out.size == 50 + t
        except BaseException as e:  # raised by the rank's own thread below
            failures.append(e)

    def body(rank: Rank) -> None:
        failures: list[BaseException] = []
        workers = [
            threading.Thread(target=work, args=(rank, t, failures), daemon=True)
            for t in range(threads)
        ]
        for w in workers:
            w.start()
        for w in workers:
            w.join(40)
            assert not w.is_alive()
        if failures:
            raise failures[0]

    with engines(2) as ranks:
        run(ranks, body)


def test_many_handles() -> None:
    count = 3000

    def body(rank: Rank) -> None:
        outs = [np.empty(1 + k % 7) for k in range(count)]
        handles = [
            rank.submit(ALLREDUCE, f"x{k}", [np.full(1 + k % 7, float(k))], [outs[k]])
            for k in range(count)
        ]
        assert len(set(handles)) == count and min(handles) > 0
        for k in random.Random(rank.rank).sample(range(count), count):
            rank.finish(handles[k])
            assert (outs[k] == 2 * k).all()

    with engines(2) as ranks:
        run(ranks, body)


# -------------------------------------------------------------------------------------------------
# Handles and waiting


def test_a_handle_is_done_when_all_have_called() -> None:
    with engines(2) as (first, second):
        handle = first.submit(ALLREDUCE, "x", [ones(4)])
        assert not first.engine.poll(handle)
        assert not first.engine.wait(handle, 0.05)
        assert not first.engine.wait(handle, 0.0)
        with pytest.raises(ValueError, match="isn't done"):
            first.engine.take(handle)
        assert first.engine.pending() == ["x"]
        other = second.submit(ALLREDUCE, "x", [ones(4)])
        first.finish(handle)
        second.finish(other)
        assert first.engine.pending() == []


def test_polling_alone_gets_there() -> None:
    with engines(2) as ranks:
        handles = [rank.submit(ALLREDUCE, "x", [ones(100_000)]) for rank in ranks]
        deadline = time.monotonic() + 10
        while not all(r.engine.poll(h) for r, h in zip(ranks, handles, strict=True)):
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)


def test_unknown_handles() -> None:
    with engines(1) as (rank,):
        done = rank.submit(ALLREDUCE, "x", [ones(4)])
        rank.finish(done)
        for handle in (done, 0, -1, 12345):
            for use in (
                rank.engine.poll,
                rank.engine.take,
                lambda h: rank.engine.wait(h, 1.0),
            ):
                with pytest.raises(ValueError, match=str(handle)):
                    use(handle)


WAITS: dict[str, Callable[[Any, int], Any]] = {
    "wait": lambda engine, handle: engine.wait(handle, 30.0),
    "finish": lambda engine, handle: engine.finish(handle),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_lets_other_threads_run(wait: Callable[[Any, int], Any]) -> None:
    with engines(2) as (first, second):
        handle = first.submit(ALLREDUCE, "x", [ones(4)])
        waiter = threading.Thread(target=wait, args=(first.engine, handle), daemon=True)
        waiter.start()
        # Only this thread can end the wait: holding the GIL in it would be a deadlock.
        second.call(ALLREDUCE, "x", [ones(4)])
        waiter.join(10)
        assert not waiter.is_alive()


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_ctrl_c_ends_a_wait_and_nothing_else(wait: Callable[[Any, int], Any]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with engines(2) as (first, second):
            handle = first.submit(ALLREDUCE, "x", [ones(4)])
            main = threading.get_ident()
            timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                wait(first.engine, handle)
            assert time.monotonic() - start < 5
            second.submit(ALLREDUCE, "x", [ones(4)])
            first.finish(handle)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_loses_no_result_that_came_just_then() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()
    try:
        with engines(2) as (first, second):

            def interrupt_and_answer() -> None:
                time.sleep(0.02)
                signal.pthread_kill(main, signal.SIGINT)
                second.call(ALLREDUCE, "x", [ones(4)])

            for _ in range(10):
                handle = first.submit(ALLREDUCE, "x", [ones(4)])
                other = threading.Thread(target=interrupt_and_answer)
                with pytest.raises(KeyboardInterrupt):
                    other.start()
                    first.engine.finish(handle)
                other.join(10)
                assert first.engine.finish(handle) is not None
    finally:
        signal.signal(signal.SIGINT, before)


def test_outputs_outlive_their_engine() -> None:
    with engines(2) as ranks:
        outputs = run(ranks, lambda rank: rank.call(ALLGATHER, "x", [ones(5000)]).outputs[0])
    assert all((np.from_dlpack(out) == 1).all() for out in outputs)
