"""Runs the scripts of examples/: as users start them, or in the ranks of a world."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

from horovod.common import basics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCHER = (sys.executable, "-m", "horovod.runner")


def run(n: int, script: str, *words: str) -> str:
    """What a script prints that is started with n processes, or without a launcher if n is 1."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(
        command if n == 1 else [*LAUNCHER, "-np", str(n), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main_program(script: str, words: list[str]) -> str:
    """What a script prints on this rank of a world, as the main program that it is."""
    printed = io.StringIO()
    try:
        with mock.patch("sys.argv", [script, *words]), contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        assert not basics.is_initialized()
    finally:
        basics.init()
    return printed.getvalue()
