"""Runs a script as the ranks of a job, as a launcher would, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from horovod.common.store import Job, StoreServer

PRELUDE = """
import os, sys, time, threading, signal
from horovod.common import basics, process_sets
from horovod.common.exceptions import *

def run(engine, handle):
    return basics.finish(engine, handle, "test")

def barrier(name="b", process_set=0):
    engine = basics.engine()
    try:
        handle = engine.submit(
            5, "barrier." + name, process_set, [], 1, 1.0, 1.0, -1, None, False, None
        )
    except basics.Failure as failure:
        raise basics.translated(failure, "test") from None
    return run(engine, handle)

def allreduce(value, name="a", process_set=0):
    import array
    data = array.array("d", [value])
    address = data.buffer_info()[0]
    engine = basics.engine()
    try:
        handle = engine.submit(
            0, "allreduce." + name, process_set, [basics.View(address, address, 8, (1,))],
            1, 1.0, 1.0, -1, None, False, data,
        )
    except basics.Failure as failure:
        raise basics.translated(failure, "test") from None
    run(engine, handle)
    return data[0]
"""


@dataclass
class Ended:
    """How one rank ended."""

    code: int
    stdout: str
    stderr: str


class Ranks:
    """Processes with the environment that a launcher gives its workers."""

    def __init__(self, job: Job, server: StoreServer) -> None:
        self.job = job
        self.server = server
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, script: str, size: int, hosts: str | None = None, **environment: str) -> None:
        """Starts ``size`` ranks; ``hosts`` has one letter, the host's name, per rank."""
        for rank in range(size):
            placement = {
                "RANK": rank,
                "SIZE": size,
                "LOCAL_RANK": rank,
                "LOCAL_SIZE": size,
                "CROSS_RANK": 0,
                "CROSS_SIZE": 1,
                "HOSTNAME": hosts[rank] if hosts else "here",
                "STORE": self.job.address,
                "JOB_KEY_FILE": self.job.key_file,
                "JOB_ID": self.job.job_id,
            }
            variables = {f"HOROVOD_{name}": str(value) for name, value in placement.items()}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PRELUDE + script],
                    env={**os.environ, **variables, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def end(self, timeout_s: float = 30.0) -> list[Ended]:
        """Waits for all of them."""
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=timeout_s)
            ended.append(Ended(process.returncode, out, err))
        return ended

    def run(self, script: str, size: int, **options: str) -> list[Ended]:
        """Starts them and waits; all must end with 0."""
        self.start(script, size, **options)
        ended = self.end()
        codes = [e.code for e in ended]
        assert codes == [0] * size, f"{codes}\n" + "\n".join(e.stderr for e in ended)
        return ended

    def kill(self) -> None:
        """Ends what is left."""
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
