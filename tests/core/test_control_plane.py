"""The control plane's C++ tests: its laws one by one, and 5,000 random schedules of whole jobs.

Takes the programs that CMake built, if it did; else compiles them. Knows no engine and no `_core`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "core" / "cpp"
SOURCES = ["wire", "describe", "agreement", "watch", "coordinator", "order"]
LAWS = [
    "wire_test",
    "call_map_test",
    "cache_test",
    "agreement_test",
    "order_test",
    "membership_test",
]
PROGRAMS = [*LAWS, "core_simulate"]

# Compiling takes half a minute of processor time, once; the tests themselves are short.
pytestmark = pytest.mark.timeout(300)


def newest_source() -> float:
    sources = [*(ROOT / "core").glob("*"), *TESTS.rglob("*")]
    return max(source.stat().st_mtime for source in sources)


def built_by_cmake(program: str) -> Path | None:
    builds = sorted((ROOT / "build").rglob(program))
    return next((path for path in builds if path.stat().st_mtime > newest_source()), None)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {program: path for program in PROGRAMS if (path := built_by_cmake(program))}
    if len(found) == len(PROGRAMS):
        return found
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler, and CMake has built no tests")
    folder = tmp_path_factory.mktemp("control_plane")

    def compile_to(output: str, *arguments: str) -> None:
        command = [compiler, "-std=c++20", "-O1", "-I", str(ROOT), *arguments]
        subprocess.run([*command, "-o", str(folder / output)], check=True, timeout=280)

    def build(step: tuple[str, str]) -> None:
        output, source = step
        compile_to(output, "-c", source)

    steps = [(f"{name}.o", str(ROOT / "core" / f"{name}.cc")) for name in SOURCES]
    steps += [(f"{name}.o", str(TESTS / f"{name}.cc")) for name in PROGRAMS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, steps))
    core = [str(folder / f"{name}.o") for name in SOURCES]
    for program in PROGRAMS:
        compile_to(program, str(folder / f"{program}.o"), *core)
    return {program: folder / program for program in PROGRAMS}


@pytest.fixture
def run(programs: dict[str, Path]) -> Callable[..., str]:
    def run_program(program: str, *arguments: str) -> str:
        command = [str(programs[program]), *arguments]
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
        assert result.returncode == 0, result.stdout[-20000:]
        return result.stdout

    return run_program


@pytest.mark.parametrize("program", LAWS)
def test_laws_hold(run: Callable[..., str], program: str) -> None:
    assert run(program) == ""


def test_every_schedule_ends_with_agreement_or_a_named_error(run: Callable[..., str]) -> None:
    output = run("core_simulate", "--seeds", "5000")
    endings = {text: int(count) for text, count in re.findall(r"^  (.+): (\d+)$", output, re.M)}
    assert sum(endings.values()) == 5000
    for ending in ["every call completed", "errors named, every rank ended", "deadlock named"]:
        assert endings[ending] > 100, output  # the schedules are worth their time
    assert endings["peer lost"] > 10 and endings["stall ended on request"] > 10, output


def test_a_seed_can_be_looked_at(run: Callable[..., str]) -> None:
    output = run("core_simulate", "--seed", "7")
    assert "decided: entry 1 " in output
    assert output == run("core_simulate", "--seed", "7")
