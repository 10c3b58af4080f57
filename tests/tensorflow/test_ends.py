"""Case C52: a rank ends in the middle; the others' steps raise, and the launcher says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ends.py")


@pytest.mark.parametrize(
    ("how", "words"), [("raise", "KeyError: 'broken'"), ("kill", "137 (SIGKILL")]
)
def test_the_rank_that_failed_is_named(how: str, words: str) -> None:
    launcher = [sys.executable, "-m", "horovod.runner", "-np", "3", sys.executable]
    done = subprocess.run(
        [*launcher, str(PROGRAM), how], capture_output=True, text=True, timeout=55
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    verdict = "\n".join(said)
    assert done.returncode == (1 if how == "raise" else 137), done.stderr
    assert "Process 1 " in verdict and words in verdict, verdict
    assert "UnknownError" not in verdict, verdict  # what became of the others isn't the reason
    assert "UnknownError" in done.stderr
