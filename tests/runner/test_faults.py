"""Failures of workers and of the launcher itself: who is blamed, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

GONE_S = 10.0

# A rank with a child, which has a child, which is in a session of its own.
FAMILY = "sh -c 'sh -c \"setsid sleep 300\" & sleep 300' & "


def fails(rank: int, how: str, others: str = "exec sleep 300") -> list[str]:
    return ["sh", "-c", f'if [ "$HOROVOD_RANK" = {rank} ]; then {how}; else {others}; fi']


def blamed(stderr: bytes) -> dict[str, str]:
    """What the launcher says of the first cause."""
    text = stderr.decode()
    assert "Horovod detected that one or more processes exited with non-zero status" in text
    return dict(re.findall(r"^(Process name|Exit code|Host|Reason|Note): (.*)$", text, re.M))


def children(pid: int) -> list[int]:
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(word) for text in texts for word in text.split()]


def test_a_failing_worker_ends_the_job(launcher) -> None:
    start = time.monotonic()
    result = launcher.run("-np", "3", *fails(1, "echo cause >&2; exit 7"))
    took = time.monotonic() - start
    assert result.returncode == 7
    said = blamed(result.stderr)
    assert (said["Process name"], said["Exit code"]) == ("1", "7")
    assert "Reason" not in said  # a line that is no traceback's may be about anything
    assert re.fullmatch(r"localhost, pid \d+", said["Host"])
    lines = result.stderr.decode().splitlines()
    first = lines.index("Process 1 exit with status code 7.")
    assert lines.index("Terminating remaining workers after failure of Process 1.") > first
    for rank in (0, 2):
        assert f"Process {rank} exit with status code 143." in lines
    assert 5 <= took < 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_128_more(launcher, number: signal.Signals) -> None:
    result = launcher.run("-np", "2", *fails(1, f"kill -{number} $$", "exit 0"))
    assert result.returncode == 128 + number
    assert blamed(result.stderr)["Exit code"].startswith(f"{128 + number} ({number.name}")


def test_ranks_that_end_normally_never_end_the_job(launcher) -> None:
    result = launcher.run("-np", "3", *fails(1, "exit 0", "sleep 1; echo done"))
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [b"[0]<stdout>:done", b"[2]<stdout>:done"]
    assert result.stderr == b""


def test_survivors_have_a_grace_to_end_by_themselves(launcher) -> None:
    result = launcher.run("-np", "2", *fails(1, "exit 3", "sleep 2; echo saved; exit 4"))
    assert result.returncode == 3
    assert b"[0]<stdout>:saved\n" in result.stdout
    assert b"Terminating" not in result.stderr


def test_survivors_that_ignore_sigterm_are_killed(launcher) -> None:
    stubborn = "trap '' TERM; echo deaf; while :; do sleep 1; done"
    start = time.monotonic()
    result = launcher.run("-np", "2", *fails(1, "exit 3", stubborn), program=launcher.hasty)
    assert result.returncode == 3
    assert b"Process 0 exit with status code 137." in result.stderr
    assert 1 <= time.monotonic() - start < 5


# As a rank with an engine does: the one that fails reports itself and is slow to end; the others
# report that they lost it and end at once.
REPORTER = """
import json, os, sys, time
from horovod.common import config
from horovod.common.store import StoreClient, read_key
s = config.from_environ()
store = StoreClient(s.store, read_key(s.job_key_file), s.job_id, s.rank)
def report(lost, text):
    fault = {"lost": lost, "exception": text, "text": text, "time": time.monotonic()}
    store.set(f"fault/{s.rank}", json.dumps(fault).encode())
if s.rank == 1:
    report(None, "KeyError: 'x'")
    store.set("failed", b"")
    time.sleep(0.3)
    raise KeyError("x")
store.get("failed", 20)
report((s.rank + 1) % 4, "PeerLostError: ...")  # not all see the same neighbour go first
raise RuntimeError("lost a peer")
"""


def test_the_cause_is_blamed_and_not_the_first_one_seen(launcher) -> None:
    result = launcher.run("-np", "4", sys.executable, "-c", REPORTER)
    said = blamed(result.stderr)
    assert (said["Process name"], said["Reason"]) == ("1", "KeyError: 'x'")
    assert result.returncode == 1
    assert result.stderr.index(b"Process 0 exit") < result.stderr.index(b"Process 1 exit")


def test_the_last_line_of_a_traceback_is_the_reason(launcher) -> None:
    result = launcher.run("-np", "1", sys.executable, "-c", "{}['x']")
    assert blamed(result.stderr)["Reason"] == "KeyError: 'x'"
    assert result.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_launcher_end_the_job(launcher, number: signal.Signals) -> None:
    process = launcher.start("-np", "2", "sh", "-c", FAMILY + "echo up; wait")
    for _ in range(2):
        process.stdout.readline()
    start = time.monotonic()
    process.send_signal(number)
    assert process.wait(GONE_S) == 128 + number
    assert time.monotonic() - start < 5  # SIGKILL would come then
    assert number.name.encode() in process.stderr.read()
    assert launcher.left_behind() == []


def test_a_second_signal_does_not_ask(launcher) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 1; done"
    process = launcher.start("-np", "2", "sh", "-c", script)
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(GONE_S) == 130
    assert time.monotonic() - start < 5  # SIGKILL would come then


def test_nohup_is_honoured(launcher) -> None:
    process = launcher.start(
        "-np",
        "1",
        "sh",
        "-c",
        "echo up; sleep 1; echo end",
        program=("nohup", sys.executable, "-m", "horovod.runner"),
    )
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, b"[0]<stdout>:end\n")


def test_a_killed_launcher_leaves_nothing(launcher, wait_until) -> None:
    process = launcher.start("-np", "2", "sh", "-c", FAMILY + "trap '' TERM; echo up; wait; wait")
    for _ in range(2):
        process.stdout.readline()
    # The job's directory, the launcher, two families of three.
    assert wait_until(lambda: len(launcher.left_behind()) >= 8, 5), launcher.left_behind()
    process.kill()
    process.wait(5)
    assert wait_until(lambda: launcher.left_behind() == [], GONE_S), launcher.left_behind()
    assert launcher.run("-np", "2", "true").returncode == 0


def guardians_of(pid: int) -> list[int]:
    """Empty while there is none, or while it is still the launcher's image (before its exec)."""
    found = []
    for child in children(pid):
        try:
            if b"guardian.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except FileNotFoundError:  # it has just ended
            continue
    return found


def test_a_killed_guardian_is_replaced(launcher, wait_until) -> None:
    process = launcher.start("-np", "1", "sh", "-c", FAMILY + "echo up; wait")
    process.stdout.readline()
    assert wait_until(lambda: len(guardians_of(process.pid)) == 1, 10)
    (first,) = guardians_of(process.pid)
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: guardians_of(process.pid) not in ([], [first]), 10)
    assert process.poll() is None
    process.kill()
    process.wait(5)
    assert wait_until(lambda: launcher.left_behind() == [], GONE_S), launcher.left_behind()


def test_a_killed_shell_between_leaves_nothing(launcher) -> None:
    """kill -9 of a process between the launcher and the one that works."""
    inner = "sh -c 'echo $$ up; sleep 300; :' ; :"
    process = launcher.start("-np", "2", "sh", "-c", inner, program=launcher.hasty)
    line = process.stdout.readline()
    process.stdout.readline()
    rank = int(line[1:2])
    pid = int(line.partition(b":")[2].split()[0])
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    assert process.wait(20) == 137
    assert blamed(process.stderr.read())["Process name"] == str(rank)
    assert launcher.left_behind() == []


def test_a_killed_outer_launcher_ends_inner_ones(launcher, wait_until) -> None:
    inner = f"{sys.executable} -m horovod.runner -np 2 sh -c 'echo up; sleep 300; :'"
    process = launcher.start("-np", "1", "sh", "-c", f"{inner}; :")
    for _ in range(2):
        process.stdout.readline()
    process.kill()
    process.wait(5)
    assert wait_until(lambda: launcher.left_behind() == [], GONE_S), launcher.left_behind()


def test_what_a_rank_leaves_running_ends_with_the_job(launcher) -> None:
    """It holds the pipe, and may still write for a moment."""
    script = "(sleep 0.5; echo late; exec sleep 300) & (setsid sleep 300 &) ; echo early"
    start = time.monotonic()
    result = launcher.run("-np", "1", "sh", "-c", script)
    assert result.returncode == 0
    assert result.stdout == b"[0]<stdout>:early\n[0]<stdout>:late\n"
    assert time.monotonic() - start < 6
    assert launcher.left_behind() == []


def test_a_rank_that_is_stopped_can_be_ended(launcher) -> None:
    process = launcher.start("-np", "2", "sh", "-c", "echo up; kill -STOP $$")
    for _ in range(2):
        process.stdout.readline()
    process.terminate()
    start = time.monotonic()
    assert process.wait(20) == 143
    assert time.monotonic() - start < 5  # SIGKILL would come then
    assert launcher.left_behind() == []


def test_ends_of_children_are_seen_whatever_the_parent_ignores(launcher) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'horovod.runner', *sys.argv[1:]])\n"
    )
    result = launcher.run("-np", "1", "sh", "-c", "exit 9", program=(sys.executable, "-c", program))
    assert result.returncode == 9
