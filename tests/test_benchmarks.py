"""The benchmark suite runs and reports; and a loose guard of speed, by ratios within one run."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "benchmarks" / "run.py"

pytestmark = pytest.mark.timeout(170)  # one short run for all

ROWS = {
    "sizes": {"horovod", "torch-gloo", "limit"},
    "negotiation": {"horovod", "horovod, grouped", "torch-gloo", "torch-gloo, buckets"},
    "training": {"horovod", "torch-gloo"},
}


def run(out: Path, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), "--quick", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run with what needs no installation, and a peer that can't be had."""
    out = tmp_path_factory.mktemp("report")
    environments = out / "a file, where no environment can be made"
    environments.touch()
    run(
        out,
        *("--suite", *ROWS, "--points", "4 B", "1 MiB", "16 MiB", "161", "mlp"),
        *("--environments", str(environments)),
        *("--peers", "horovod", "torch-gloo", "mpich", "limit"),
        *("--seconds", "0.2", "--rounds", "3"),
    )
    return out


def found(out: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((out / "results.json").read_text("utf-8"))
    return results


def medians(out: Path, suite: str) -> dict[tuple[str, str], float]:
    return {
        (result["row"], result["column"]): statistics.median(result["samples"])
        for result in found(out)["results"]
        if result["suite"] == suite
    }


@pytest.mark.parametrize("suite", ROWS)
def test_every_suite_has_its_table(out: Path, suite: str) -> None:
    _, _, after = (out / "report.md").read_text("utf-8").partition(f"### {suite}, 2 processes\n")
    table = after.partition("###")[0]
    assert {row for row, _ in medians(out, suite)} >= ROWS[suite]
    for row in ROWS[suite]:
        assert f"\n| {row} | **" in table


def test_who_is_absent_is_named(out: Path) -> None:
    (absence,) = found(out)["absences"]
    assert absence["peer"] == "mpich"
    assert f"- mpich: {absence['reason']}\n" in (out / "report.md").read_text("utf-8")


@pytest.mark.parametrize("point", ["4 B", "1 MiB", "16 MiB"])
def test_faster_than_gloo(out: Path, point: str) -> None:
    times = medians(out, "sizes")
    assert times["horovod", point] < times["torch-gloo", point]


def test_close_to_what_the_memory_allows(out: Path) -> None:
    """Within a factor of two, since others may have the machine as well."""
    times = medians(out, "sizes")
    assert times["horovod", "16 MiB"] < 2 * times["limit", "16 MiB"]


def test_memory(tmp_path: Path) -> None:
    run(tmp_path, "--suite", "memory", "-np", "1", "--peers", "horovod", "--points", "64 MiB")
    beyond_mib = medians(tmp_path, "memory")
    assert beyond_mib["horovod", "before init"] > beyond_mib["horovod", "init"] > 0
    assert ("horovod", "64 MiB") in beyond_mib


def test_time_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints counts, if it prints; one that fails says so."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    import commands

    assert commands.took_s([sys.executable, "-c", "print(2.5)"]) == 2.5
    assert 0.1 < commands.took_s([sys.executable, "-c", "import time; time.sleep(0.1)"]) < 10
    with pytest.raises(commands.CommandFailed, match="3: why"):
        commands.took_s(
            [sys.executable, "-c", "import sys; print('why', file=sys.stderr); exit(3)"]
        )
