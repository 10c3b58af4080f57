"""The soak in its short form; by hand it runs for minutes: see soak.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).with_name("soak.py")


def test_random_collectives_are_right() -> None:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HOROVOD_")}
    command = [sys.executable, "-m", "horovod.runner", "-np", "4", sys.executable, str(SOAK)]
    done = subprocess.run(
        [*command, "--minutes", "0.08"],
        env={**kept, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=58,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = re.search(r"sound: (\d+) rounds", done.stdout)
    assert rounds is not None and int(rounds[1]) > 0, done.stdout
