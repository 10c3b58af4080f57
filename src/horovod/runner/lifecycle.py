"""When a job's processes are asked to end, killed, or given up; pure: no process, no clock.

A job runs until every rank has ended. The first failure, or a rank lost for good, gives those that
are left a grace to end by themselves; then they are asked to (SIGTERM), then killed. A signal to
the launcher skips the grace, a second one skips the asking. A rank that ends normally changes
nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Action(enum.Enum):
    """What has to be done now."""

    NONE = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()
    ABANDON = enum.auto()


class Phase(enum.Enum):
    """How far the end of a job has come."""

    RUNNING = enum.auto()
    GRACE = enum.auto()
    TERMINATING = enum.auto()
    KILLING = enum.auto()
    ABANDONED = enum.auto()


@dataclass(frozen=True)
class Limits:
    """Seconds that a phase may take."""

    grace_s: float = 5.0
    term_s: float = 5.0
    kill_s: float = 5.0


class Lifecycle:
    """The phases of one job.

    Attributes:
        phase: where the job is.
        deadline: when the phase ends if nothing happens; None for never.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.phase = Phase.RUNNING
        self.deadline: float | None = None

    def failed(self, now: float) -> Action:
        """A rank has ended with an error, or will never end: the others lost it and are gone."""
        if self.phase is Phase.RUNNING:
            self._enter(Phase.GRACE, now + self._limits.grace_s)
        return Action.NONE

    def interrupted(self, now: float) -> Action:
        """The launcher was told to stop."""
        if self.phase in (Phase.RUNNING, Phase.GRACE):
            return self._terminate(now)
        if self.phase is Phase.TERMINATING:
            return self._kill(now)
        return Action.NONE

    def tick(self, now: float) -> Action:
        """Time has passed."""
        if self.deadline is None or now < self.deadline:
            return Action.NONE
        if self.phase is Phase.GRACE:
            return self._terminate(now)
        if self.phase is Phase.TERMINATING:
            return self._kill(now)
        self._enter(Phase.ABANDONED, None)
        return Action.ABANDON

    def _terminate(self, now: float) -> Action:
        self._enter(Phase.TERMINATING, now + self._limits.term_s)
        return Action.TERMINATE

    def _kill(self, now: float) -> Action:
        self._enter(Phase.KILLING, now + self._limits.kill_s)
        return Action.KILL

    def _enter(self, phase: Phase, deadline: float | None) -> None:
        self.phase = phase
        self.deadline = deadline
