"""What engines keep and use up over time: memory, threads, descriptors, maps, wake-ups."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def soak(scene: str) -> Any:
    """The scene's numbers, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("soak.py"), scene],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.timeout(130)
def test_calls_of_one_name_leave_nothing_behind() -> None:
    assert soak("calls")["growth_bytes"] < 1 << 20


@pytest.mark.timeout(130)
@pytest.mark.parametrize("scene", ["cycles", "busy cycles"])
def test_engines_that_come_and_go_leave_nothing_behind(scene: str) -> None:
    early, late = soak(scene).values()
    assert late["rss_bytes"] - early["rss_bytes"] < 2 << 20
    for what in ("threads", "files", "maps"):
        assert late[what] == early[what], (what, early, late)


def test_idle_engines_sleep() -> None:
    idle = soak("idle")
    assert idle["wakeups_per_s"] < 5
    assert idle["cpu"] < 0.005
