"""``horovod bench`` and ``horovod``: what they print, refuse and survive; no number is judged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horovod.bench import report
from horovod.bench.limit import Kind, Span, fastest
from horovod.bench.points import MODELS, SIZES_BYTES
from horovod.bench.worker import Point, Report, Times

HOROVOD = (sys.executable, "-m", "horovod")
BENCH = (*HOROVOD, "bench")


@pytest.mark.parametrize(("size", "sets"), [(1, ["resnet50"]), (2, ["resnet50"]), (3, [])])
def test_table_and_json_have_every_point(
    launcher, size: int, sets: list[str], tmp_path: Path
) -> None:
    """Three ranks on two processors would take 50 s of CPU time for the set's yard-stick."""
    file = tmp_path / "bench.json"
    points = ["--sizes", "4", "100K", "1M", "--sets", *sets]
    words = ["-np", str(size), *points, "--seconds", "0.01", "--json", str(file)]
    done = launcher.run(*words, program=BENCH, timeout_s=50)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    expected = {"4 B": (4, 1), "100 KiB": (100 << 10, 1), "1 MiB": (1 << 20, 1)}
    if sets:
        expected["resnet50: 161 tensors, 102 MB"] = (4 * 25_557_032, 161)
    for title in expected:
        assert re.search(rf"^{title} ", text, re.M), text
    found = json.loads(file.read_text("utf-8"))
    assert found["ranks"] == size
    assert found["machine"]["ranks_per_host"] == {"localhost": size}
    assert found["machine"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert found["machine"]["simd"] in ("baseline", "avx2", "avx512")
    assert [(p["bytes"], p["tensors"]) for p in found["points"]] == [*expected.values()]
    for point in found["points"]:
        assert point["turns"] >= 5
        assert 0 < point["ours_s"]["p10"] <= point["ours_s"]["p50"] <= point["ours_s"]["p90"]
        if size == 1:
            assert point["limit_s"] is point["ratio"] is point["limit_stores"] is None
        else:
            assert point["ratio"] == point["ours_s"]["p50"] / point["limit_s"]["p50"] > 0
            assert point["limit_stores"] in ("ordinary", "streaming")
            assert point["bus_bytes_per_s"] > 0
    last = text.splitlines()[-1]
    assert last.startswith("1 MiB at " if size > 1 else "No host has several ranks"), last


def test_the_kind_with_the_fastest_turn_is_taken() -> None:
    """Each has a turn in every round; a slow one says nothing."""
    slow, fast = Kind(False, 1 << 20), Kind(True, 64 << 10)
    took = iter([3, 9, 4, 2, 3, 9])
    run: list[Kind] = []

    def turn(kind: Kind) -> Span:
        run.append(kind)
        return Span(10, 10 + next(took))

    assert fastest([slow, fast], 3, turn) == fast
    assert run == [slow, fast] * 3


def test_without_np_each_slot_gets_a_rank(launcher) -> None:
    words = ["-H", "localhost:3", "--sizes", "4", "--sets", "--seconds", "0.01"]
    done = launcher.run(*words, program=BENCH)
    assert done.returncode == 0, done.stderr
    assert b"ranks: 3 on localhost" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sizes", "5"], "'5': a multiple of 4"),
        (["--sizes", "16X"], "'16X': a multiple of 4"),
        (["--sizes", "0"], "'0': a multiple of 4"),
        (["--sets", "vgg"], "invalid choice: 'vgg'"),
        (["--seconds", "0"], "'0': a number above 0"),
        (["--seconds", "nan"], "'nan': a number above 0"),
        (["--sizes", "--sets"], "nothing to measure"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json: No such file"),
        (["-np", "0"], "0 processes can't be started"),
        (["-np", "2", "-H", "localhost"], "2 processes need 2 slots"),
        (["-np", "2", "-H", "a.invalid:2"], "remote hosts are not supported yet: a.invalid"),
        (["-np", "2", "--mpi"], "MPI is not supported"),
        (["-np", "2", "--no-such"], "unrecognized arguments: --no-such"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(launcher, words: list[str], text: str) -> None:
    done = launcher.run(*words, program=BENCH)
    assert done.returncode == 2
    assert text in done.stderr.decode().splitlines()[-1]
    assert done.stdout == b""


def test_a_full_disk_costs_the_file_but_not_the_table(launcher) -> None:
    words = ["-np", "1", "--sizes", "4", "--sets", "--seconds", "0.01", "--json", "/dev/full"]
    done = launcher.run(*words, program=BENCH)
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr
    assert re.search(rb"^4 B ", done.stdout, re.M)


def test_a_rank_that_is_killed_ends_it_with_an_error(launcher, wait_until) -> None:
    process = launcher.start(
        "-np", "3", "--sizes", "1M", "--sets", "--seconds", "600", program=BENCH
    )

    def measuring() -> list[int]:
        here = set(launcher.marked(f"TMPDIR={launcher.directory}\0"))
        ranks = here & set(launcher.marked("HOROVOD_RANK=1\0"))
        return [pid for pid in ranks if "horovod-bench" in Path(f"/proc/{pid}/maps").read_text()]

    assert wait_until(lambda: len(measuring()) == 1, 20)
    os.kill(measuring()[0], signal.SIGKILL)
    start = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL, err
    assert time.monotonic() - start < 20
    assert b"Process name: 1\n" in err
    assert out == b""


def test_a_command_without_a_name_says_which_there_are() -> None:
    for words in ([], ["no-such"]):
        done = subprocess.run([*HOROVOD, *words], capture_output=True, timeout=30, check=False)
        assert done.returncode == 2
        assert b"bench" in done.stderr
        assert b"run" in done.stderr


def test_horovod_run_is_horovodrun(launcher) -> None:
    done = launcher.run("-np", "2", "sh", "-c", "exit 3", program=(*HOROVOD, "run"))
    assert done.returncode == 3


def test_a_turn_lasts_from_the_last_to_come_to_the_slowest() -> None:
    """Of one host by its own clock, and the slowest host counts."""
    point = Point("4 B", [1])
    kind = Kind(True, 65536)

    def rank(host: str, begin: float, end: float) -> Report:
        span = Span(begin, end)
        return Report(host, "a processor", 4, "avx2", [Times([span], [span], kind)])

    reports = [rank("a", 0, 5), rank("a", 1, 4), rank("b", 100, 102), rank("b", 100, 103)]
    (row,) = report.rows([point], reports)
    assert (row.ours.p50, row.ratio) == (4.0, 1.0)
    assert row.bus_bytes_per_s == 2 * 3 / 4 * 4 / 4.0
    assert "The limit is that of one host" in report.table([row], reports)
    spans = [Span(0, seconds) for seconds in range(1, 12)]
    spread = report.Spread.of([[spans]])
    assert spread == report.Spread(2, 6, 10)


def test_points_are_those_that_are_published() -> None:
    assert {name: (len(counts()), sum(counts())) for name, counts in MODELS.items()} == {
        "resnet50": (161, 25_557_032),
        "bert-base": (199, 109_482_240),
    }
    assert SIZES_BYTES[0] == 4
    assert SIZES_BYTES[-1] == 64 << 20
