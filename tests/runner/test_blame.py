"""Who failed first, from what is known when all have ended."""

from __future__ import annotations

import itertools
import json

import pytest

from horovod.runner.blame import (
    Cause,
    Exit,
    Fault,
    code_text,
    first_cause,
    given_up,
    last_words,
    parse_fault,
)


def own(text: str, time: float | None = None) -> Fault:
    return Fault(None, text, time)


def lost(rank: int, time: float | None = None) -> Fault:
    return Fault(rank, f"PeerLostError: rank {rank}", time)


def test_nobody_failed() -> None:
    assert first_cause([Exit(0, 0, 1), Exit(1, 0, 2)], {1: lost(0)}) is None


def test_the_cause_is_found_whatever_the_order_of_ends() -> None:
    faults = {0: lost(1, 10.2), 1: own("KeyError: 'x'", 10.0), 2: lost(0, 10.3), 3: lost(1, 10.1)}
    for order in itertools.permutations(range(4)):
        exits = [Exit(rank, 1, 11 + place) for place, rank in enumerate(order)]
        assert first_cause(exits, faults) == Cause(1, 1, "KeyError: 'x'")


def test_one_that_could_not_report_is_named_by_the_others() -> None:
    exits = [Exit(0, 1, 5), Exit(2, 1, 6), Exit(1, 137, 7)]
    assert first_cause(exits, {0: lost(1, 4), 2: lost(1, 4)}) == Cause(1, 137)


def test_without_reports_the_first_end_counts() -> None:
    exits = [Exit(0, 2, 5), Exit(1, 7, 4), Exit(2, 0, 1), Exit(3, 143, 6, by_launcher=True)]
    assert first_cause(exits, {}) == Cause(1, 7)


def test_two_own_faults() -> None:
    faults = {0: own("B", 2.0), 1: own("A", 1.0)}
    assert first_cause([Exit(0, 4, 3), Exit(1, 3, 9)], faults) == Cause(1, 3, "A")


def test_a_rank_that_left_normally_is_mentioned_and_not_blamed() -> None:
    cause = first_cause([Exit(1, 0, 1), Exit(0, 1, 2)], {0: lost(1, 2)})
    assert cause is not None
    assert (cause.rank, cause.code) == (0, 1)
    assert cause.note is not None
    assert "rank 1" in cause.note


def test_a_rank_that_left_is_mentioned_by_one_that_lost_another_because_of_it() -> None:
    exits = [Exit(1, 0, 1.0), Exit(2, 1, 2.0), Exit(0, 1, 2.1)]
    found = first_cause(exits, {0: lost(1, 1.5), 2: lost(0, 1.6)})
    assert found is not None
    assert (found.rank, found.note) == (2, "it still needed rank 1, which had ended normally")


def test_a_cause_that_never_ended_by_itself() -> None:
    exits = [Exit(0, 3, 5), Exit(1, 143, 10, by_launcher=True)]
    cause = first_cause(exits, {0: lost(1, 4), 1: own("KeyError: 1", 3)})
    assert cause is not None
    assert (cause.rank, cause.code, cause.reason) == (1, 1, "KeyError: 1")
    assert cause.note is not None
    assert cause.note.endswith("the launcher ended it; the job ends with exit code 1")


SILENCE = "rank 0 reported: PeerLostError: rank 1"


def test_a_frozen_rank_is_the_cause_with_what_the_first_to_lose_it_said() -> None:
    exits = [Exit(0, 3, 5), Exit(1, 143, 10, by_launcher=True), Exit(2, 4, 6)]
    note = "the launcher ended it; the job ends with exit code 3, that of rank 0"
    assert first_cause(exits, {2: lost(1, 4.1), 0: lost(1, 4)}) == Cause(1, 3, SILENCE, note)


@pytest.mark.parametrize(
    ("end", "code", "note"),
    [
        (143, 143, "the launcher ended it"),
        (0, 1, "the launcher ended it; the job ends with exit code 1"),
    ],
)
def test_a_frozen_rank_is_the_cause_though_the_others_ended_well(
    end: int, code: int, note: str
) -> None:
    exits = [Exit(0, 0, 5), Exit(1, end, 10, by_launcher=True)]
    assert first_cause(exits, {0: lost(1, 4)}) == Cause(1, code, SILENCE, note)


def test_only_the_lost_who_say_nothing_are_given_up() -> None:
    assert given_up([1], {0: lost(1)})
    assert given_up([1, 2], {0: lost(1), 3: lost(2)})
    assert not given_up([1, 2], {0: lost(1)})  # rank 2 may be at work
    assert not given_up([1], {0: lost(1), 1: lost(0)})  # rank 1 is alive
    assert not given_up([1], {0: own("x")})
    assert not given_up([], {0: lost(1)})


def test_a_circle_ends() -> None:
    cause = first_cause([Exit(0, 1, 5), Exit(1, 1, 6)], {0: lost(1, 3), 1: lost(0, 2)})
    assert cause is not None
    assert cause.rank == 0


def test_a_rank_that_leaves_may_see_the_others_go_first() -> None:
    exits = [Exit(0, 1, 5), Exit(1, 3, 6), Exit(2, 1, 7)]
    faults = {0: lost(1, 4.0), 1: lost(0, 4.1), 2: lost(0, 4.2)}
    cause = first_cause(exits, faults)
    assert cause is not None
    assert (cause.rank, cause.code, cause.reason) == (1, 3, None)


def test_all_ended_by_the_launcher() -> None:
    cause = first_cause([Exit(0, 143, 2, by_launcher=True)], {})
    assert cause == Cause(0, 143, None, "the launcher ended it")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (
            json.dumps({"lost": 2, "exception": "E: x", "text": "t", "time": 1.5}).encode(),
            Fault(2, "E: x", 1.5),
        ),
        (json.dumps({"lost": None, "text": "t"}).encode(), Fault(None, "t", None)),
        (b"{}", Fault(None, "", None)),
        (b"[1]", None),
        (b"\xff", None),
        (b"nonsense", None),
    ],
)
def test_reports(data: bytes, fault: Fault | None) -> None:
    assert parse_fault(data) == fault


def test_exit_codes_in_words() -> None:
    assert code_text(3) == "3"
    assert code_text(139) == "139 (SIGSEGV)"
    assert code_text(137).startswith("137 (SIGKILL, ")
    assert code_text(255) == "255"


TRACEBACK = b'Traceback (most recent call last):\n  File "x"\nKeyError: 1\n'


@pytest.mark.parametrize(
    ("stderr", "code", "line"),
    [
        (b"", 1, None),
        (b"one\ntwo\n\n", 1, None),
        (TRACEBACK, 1, "KeyError: 1"),
        (TRACEBACK + b"after\n", 1, "KeyError: 1"),
        (
            b"Traceback (most recent call last):\n  File\nA: 1\n\nDuring handling\n\n"
            b"Traceback (most recent call last):\n  File\nmod.B: 2\nmore\n",
            1,
            "mod.B: 2",
        ),
        (b"Traceback (most recent call last):\n  cut", 1, None),
        (b"Traceback (most recent call last): or so\nI said\n", 1, None),
        (b"WARNING: harmless\n", 137, None),
        (TRACEBACK + b"\n", 134, "KeyError: 1"),
        (TRACEBACK + b"going on with defaults\n", 137, None),
        (TRACEBACK + b"after\n", 255, "KeyError: 1"),
    ],
)
def test_last_words(stderr: bytes, code: int, line: str | None) -> None:
    assert last_words(stderr, code) == line
