"""One rank of one peer's job: does what the conductor tells it; knows no other peer.

    python rank.py SOCKET ADAPTER

Connects to SOCKET, then answers each line of JSON with one. Between two orders it sleeps in a read.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import adapters


def once(call: adapters.Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Rank:
    """The orders are its public methods."""

    def __init__(self, adapter: adapters.Adapter) -> None:
        self._adapter = adapter
        self._tensors: list[Any] = []
        self._calls: dict[tuple[str, str], adapters.Call] = {}

    def join(self) -> dict[str, Any]:
        self._adapter.join()
        made = self._adapter
        return {"rank": made.rank, "ways": made.ways, "versions": made.versions}

    def prepare(self, point: dict[str, Any], way: str) -> dict[str, Any]:
        """Checks the sums of a point, and says how long an iteration takes (s)."""
        samples = 0
        if point["kind"] == "training":
            from training import window

            make = getattr(self._adapter, way)
            call, samples = window(point["model"], self._adapter.rank, make)
        else:
            call = self._checked(point["counts"], way)
        self._calls[point["name"], way] = call
        call()
        self._adapter.barrier()
        # As many calls on every rank, whatever they took: the others would wait for ever.
        return {"seconds": once(call), "samples": samples}

    def _checked(self, counts: list[int], way: str) -> adapters.Call:
        tensors = self._adapter.tensors(counts, self._adapter.rank + 1.0)
        call = getattr(self._adapter, way)(tensors)
        call()
        for tensor in tensors:
            if not bool((tensor == self._adapter.expected()).all()):
                raise ArithmeticError(f"a wrong sum of {len(tensor)} elements ({way})")
            tensor[:] = 0  # sums of zeros stay zero, however many iterations
        self._tensors += tensors
        return call

    def run(self, point: dict[str, Any], way: str, iterations: int) -> dict[str, Any]:
        """The time of each iteration (s)."""
        call, barrier = self._calls[point["name"], way], self._adapter.barrier
        apart = point["kind"] != "tensor"
        self._adapter.warm_up(call)
        barrier()
        times = []
        for _ in range(iterations):
            if apart:
                barrier()
            times.append(once(call))
        return {"times": times}

    def forget(self) -> dict[str, Any]:
        """Frees all tensors."""
        self._tensors, self._calls = [], {}
        gc.collect()
        return {}

    def memory(self) -> dict[str, Any]:
        """Proportional set size less that of the tensors."""
        gc.collect()
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                held = sum(tensor.nbytes for tensor in self._tensors)
                return {"bytes": int(line.split()[1]) * 1024 - held}
        raise RuntimeError("no Pss in smaps_rollup")

    def end(self) -> dict[str, Any]:
        self.forget()
        self._adapter.close()
        return {}


def main() -> None:
    path, adapter = sys.argv[1:]
    rank = Rank(getattr(adapters, adapter)(Path(path).parent))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="utf-8")

        def say(reply: dict[str, Any]) -> None:
            stream.write(json.dumps(reply) + "\n")
            stream.flush()

        say({"pid": os.getpid()})
        for line in stream:
            order, arguments = json.loads(line)
            try:
                reply = getattr(rank, order)(**arguments)
            except Exception as error:
                traceback.print_exc()
                sys.stderr.flush()
                say({"error": f"{type(error).__name__}: {error}"})
                os._exit(1)  # other ranks may be inside a call that never ends: don't wait for them
            say(reply)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the conductor is gone
        main()
