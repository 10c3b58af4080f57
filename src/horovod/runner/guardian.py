"""Ends what is left of a job, also as a process of its own that outlives the launcher; stdlib only.

Run as a program it waits, asleep, for the launcher to end: a launcher that is killed can clean up
nothing. It must not import the rest of the package, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection

JOB_VARIABLE = b"HOROVOD_JOB_ID="
RELEASE = b"released"
TERM_GRACE_S = 3.0
KILL_LIMIT_S = 3.0
_PAUSE_S = 0.05
_STARTING_S = 0.2


def job_processes(job_id: str, sessions: Collection[int]) -> list[int]:
    """The live processes of a job: in one of its sessions, or started with its id.

    Only this user's own processes are looked at; this process and zombies are left out.
    """
    mark = JOB_VARIABLE + job_id.encode()
    me, mine = os.getpid(), os.getuid()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid == mine and _belongs(entry, mark, sessions):
                found.append(int(entry))
        except OSError:  # it ended meanwhile, or is not ours to look at
            continue
    return found


def _belongs(entry: str, mark: bytes, sessions: Collection[int]) -> bool:
    with open(f"/proc/{entry}/stat", "rb") as file:
        # pid (comm) state ppid pgrp session ...; comm may hold anything, also parentheses.
        state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
    if state in (b"Z", b"X"):
        return False
    if int(session) in sessions:
        return True
    with open(f"/proc/{entry}/environ", "rb") as file:
        return mark in file.read().split(b"\0")


def signal_job(job_id: str, sessions: Collection[int], number: int) -> int:
    """Sends a signal to every process of the job.

    Returns:
        How many there were.
    """
    processes = job_processes(job_id, sessions)
    count = 0
    for pid in processes:
        try:
            _send(pid, number, job_id, sessions)
            count += 1
        except OSError:  # it ended meanwhile
            continue
    return count


def _send(pid: int, number: int, job_id: str, sessions: Collection[int]) -> None:
    """Signals ``pid`` if it is still the process of the job that was found, and no successor."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if isinstance(error, ProcessLookupError):
            raise
        os.kill(pid, number)  # no pidfds in this kernel
        return
    try:
        if _belongs(str(pid), JOB_VARIABLE + job_id.encode(), sessions):
            signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def end_job(job_id: str, sessions: Collection[int], grace_s: float = TERM_GRACE_S) -> bool:
    """Asks every process of the job to end, and kills what is left after ``grace_s``.

    Returns:
        Whether all of them are gone.
    """
    deadline = time.monotonic() + grace_s
    if signal_job(job_id, sessions, signal.SIGTERM) == 0:
        return True
    signal_job(job_id, sessions, signal.SIGCONT)  # one that is stopped would never hear it
    while time.monotonic() < deadline:
        if not job_processes(job_id, sessions):
            return True
        time.sleep(_PAUSE_S)
    # Again and again: a process may fork while its parent is being killed.
    deadline = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline:
        if signal_job(job_id, sessions, signal.SIGKILL) == 0:
            return True
        time.sleep(_PAUSE_S)
    return False


def _sessions(orders: bytes) -> set[int]:
    return {int(word) for word in orders.split(b"\n") if word.isdigit()}


def watch(launcher: int, job_id: str, directory: str, orders: int) -> None:
    """Sleeps until the launcher releases this process or ends; then cleans up after it.

    Args:
        launcher: its pid.
        job_id: the job's id.
        directory: the job's directory, removed at the end.
        orders: descriptor from which come the sessions of the job, a line each, and the release.
    """
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    with contextlib.suppress(OSError):  # it has ended, or there are no pidfds: the pipe tells
        poll.register(os.pidfd_open(launcher), select.POLLIN)
    received = b""
    while os.getppid() == launcher:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if orders not in ready:
            break
        data = os.read(orders, 4096)
        if not data:
            break
        received += data
        if received.endswith(RELEASE):
            return
    while select.select([orders], [], [], 0)[0]:  # what was said before the end
        data = os.read(orders, 4096)
        if not data:
            break
        received += data
    end_job(job_id, _sessions(received))
    # A process that the launcher was just starting bears no mark before it runs its program.
    time.sleep(_STARTING_S)
    end_job(job_id, _sessions(received))
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3], orders=0)
