"""The launcher with workers that use the engine: the first cause is named, whoever ends first."""

from __future__ import annotations

import re
import sys
import time

import pytest

import horovod

# Without a framework, whose import takes seconds: one allreduce through the engine itself.
WORKER = """
import array, os, signal, sys, time
from horovod.common import basics

def allreduce(name):
    data = array.array("d", [1.0])
    address, engine = data.buffer_info()[0], basics.engine()
    try:
        handle = engine.submit(0, "allreduce." + name, 0, [basics.View(address, address, 8, (1,))],
                               1, 1.0, 1.0, -1, None, False, data)
    except basics.Failure as failure:
        raise basics.translated(failure, name) from None
    basics.finish(engine, handle, name)
    return data[0]

def work(how):
    rank = int(os.environ["HOROVOD_RANK"])
    if how == "before":
        if rank == 1:
            raise KeyError("boom")
    if how == "absent" and rank == 1:
        return
    if how == "absent" and rank == 2:  # comes when it is known
        time.sleep(1.5)
    basics.init()
    assert allreduce("a") == basics.size()
    if rank == 1:
        if how == "raise":
            raise KeyError("boom")
        if how == "slow":  # the one to blame ends last
            import threading
            threading.Thread(target=time.sleep, args=(1.5,)).start()
            raise KeyError("boom")
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(4)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave":
            basics.shutdown()
            return rank
        if how.startswith("freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
    if how == "good":
        return rank
    try:
        while True:
            allreduce("b")
    except basics.HorovodInternalError:
        if how != "freeze, caught":
            raise
"""


HANGS = ("freeze", "freeze, caught")


def blamed(stderr: str) -> dict[str, str]:
    return dict(re.findall(r"^(Process name|Exit code|Host|Reason|Note): (.*)$", stderr, re.M))


def run(launcher, size: int, how: str):
    words = [sys.executable, "-c", WORKER + f"\nwork({how!r})"]
    # Nobody waits for ranks that are stopped.
    program = {"program": launcher.hasty} if how in HANGS else {}
    env = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "2"} if how.startswith("freeze") else {}
    result = launcher.run("-np", str(size), *words, timeout_s=50, env=env, **program)
    return result.returncode, blamed(result.stderr.decode()), result


def test_a_good_job(launcher) -> None:
    code, _, result = run(launcher, 4, "good")
    assert (code, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("raise", 1, "KeyError: 'boom'"),
        ("slow", 1, "KeyError: 'boom'"),
        ("before", 1, "KeyError: 'boom'"),
        ("exit", 3, None),
        ("_exit", 4, None),
        ("kill", 137, None),
    ],
)
def test_the_cause_is_named(launcher, how: str, code: int, reason: str | None) -> None:
    returncode, said, result = run(launcher, 3, how)
    assert said["Process name"] == "1", result.stderr.decode()
    assert returncode == code
    assert said.get("Reason") == reason
    assert re.fullmatch(r"localhost, pid \d+", said["Host"])


@pytest.mark.parametrize(
    ("how", "code", "whose"),
    [("freeze", 1, "; the job ends with exit code 1, that of rank 0"), ("freeze, caught", 143, "")],
)
def test_a_frozen_rank_is_ended_and_named(launcher, how: str, code: int, whose: str) -> None:
    returncode, said, result = run(launcher, 2, how)
    assert (returncode, said["Process name"]) == (code, "1"), result.stderr.decode()
    assert said["Exit code"] == "143 (SIGTERM)"
    assert said["Note"] == f"the launcher ended it{whose}"
    # What was reported is the engine's text or, if that was first, the exception's with it.
    reason = r"rank 0 reported: .*rank 1 \(localhost pid \d+\) gave no sign of life for \d+ s: .*"
    assert re.fullmatch(reason, said["Reason"]), said
    assert b"Terminating " in result.stderr


def test_nobody_waits_in_init_for_a_rank_that_has_ended(launcher) -> None:
    began = time.monotonic()
    returncode, said, result = run(launcher, 3, "absent")
    assert time.monotonic() - began < 20  # the time limit of init() is 30 s
    assert (returncode, said["Process name"]) == (1, "0"), result.stderr.decode()
    text = "rank 1 has ended (exit code 0), so 'init' can't be completed"
    for rank in (0, 2):
        assert f"PeerLostError: [horovod {rank}/3] init: {text}" in result.stderr.decode()


def test_a_rank_that_leaves_early_is_mentioned(launcher) -> None:
    returncode, said, _ = run(launcher, 3, "leave")
    assert returncode == 1
    assert said["Process name"] in ("0", "2")
    assert "rank 1" in said["Reason"]
    assert "rank 1, which had ended normally" in said["Note"]


def test_an_exception_is_blamed_every_time(launcher) -> None:
    for _ in range(5):
        _, said, result = run(launcher, 4, "raise")
        assert (said["Process name"], said["Reason"]) == ("1", "KeyError: 'boom'"), result.stderr


def test_run_with_the_engine() -> None:
    def call(how: str, source: str) -> object:
        namespace: dict[str, object] = {}
        exec(source, namespace)
        return namespace["work"](how)  # type: ignore[operator]

    assert horovod.run(call, ("good", WORKER), num_proc=2) == [0, 1]
    with pytest.raises(RuntimeError) as caught:
        horovod.run(call, ("raise", WORKER), num_proc=3)
    text = str(caught.value)
    assert "Process name: 1\n" in text
    assert text.rstrip().endswith("KeyError: 'boom'")
