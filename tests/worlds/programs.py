"""Runs scripts: as users start them, or in the ranks of a world, as the main programs they are."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

from horovod.common import basics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCHER = (sys.executable, "-m", "horovod.runner")


def run(n: int, script: str, *words: str) -> str:
    """What an example prints that is started with n processes, or without a launcher if n is 1."""
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
    """What an example prints on this rank of a world."""
    printed = io.StringIO()
    try:
        with mock.patch("sys.argv", [script, *words]), contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        assert not basics.is_initialized()
    finally:
        basics.init()
    return printed.getvalue()


def run_programs(directory: Path) -> None:
    """Runs what lies there, in order, on this rank of a world."""
    basics.shutdown()  # their own init() is the first
    here = os.getcwd()
    os.chdir(directory)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
            for program in sorted(directory.glob("*.py")):
                runpy.run_path(str(program), run_name="__main__")
    finally:
        os.chdir(here)
        basics.init()
