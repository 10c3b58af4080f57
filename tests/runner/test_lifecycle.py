"""When processes are asked to end, killed, or given up, with a made-up clock."""

from __future__ import annotations

from horovod.runner.lifecycle import Action, Lifecycle, Limits, Phase

LIMITS = Limits(grace_s=5, term_s=5, kill_s=5)


def test_a_job_without_a_failure_has_no_deadline() -> None:
    life = Lifecycle(LIMITS)
    assert life.deadline is None
    assert life.tick(1e9) is Action.NONE
    assert life.phase is Phase.RUNNING


def test_a_failure_leads_to_grace_term_kill_and_giving_up() -> None:
    life = Lifecycle(LIMITS)
    assert life.failed(100) is Action.NONE
    assert life.deadline == 105
    assert life.tick(104.9) is Action.NONE
    assert life.tick(105) is Action.TERMINATE
    assert life.tick(109.9) is Action.NONE
    assert life.tick(110) is Action.KILL
    assert life.tick(115) is Action.ABANDON
    assert life.phase is Phase.ABANDONED
    assert life.deadline is None


def test_the_limits_as_shipped() -> None:
    assert Limits() == Limits(grace_s=5, term_s=5, kill_s=5)


def test_later_failures_do_not_prolong_the_grace() -> None:
    life = Lifecycle(LIMITS)
    life.failed(100)
    life.failed(104)
    assert life.tick(105) is Action.TERMINATE
    life.failed(106)
    assert life.tick(110) is Action.KILL


def test_a_signal_skips_the_grace_and_a_second_one_the_asking() -> None:
    for before in (lambda life: None, lambda life: life.failed(100)):
        life = Lifecycle(LIMITS)
        before(life)
        assert life.interrupted(101) is Action.TERMINATE
        assert life.deadline == 106
        assert life.interrupted(102) is Action.KILL
        assert life.interrupted(103) is Action.NONE
        assert life.deadline == 107
