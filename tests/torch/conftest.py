"""Runs tests in several ranks under our own launcher.

A test marked ``np(n)`` runs in every rank of a world of n processes; ``np(2, 3)`` runs it in both
worlds. Worlds are started once and serve many tests, since importing torch takes seconds; a world
in which a test failed is ended, and a new one takes its place. ``np(2, fresh=True)`` gives a test
a world of its own, ``np(2, env={...})`` one with variables besides. The fixture ``run_in`` runs a
function of the test's module in a world and gives the results by rank.
"""

from __future__ import annotations

import inspect
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = (sys.executable, "-m", "horovod.runner")
WORKER = Path(__file__).with_name("worker.py")
sys.path.insert(0, str(WORKER.parent))  # tests import what they share as the ranks do
START_S = 40.0
TEST_S = 45.0
STOP_S = 15.0


class World:
    """n ranks that wait for work."""

    def __init__(self, size: int, directory: Path, env: dict[str, str] | None = None) -> None:
        self.size = size
        self.alive = True
        key = secrets.token_bytes(16)
        address = str(directory / f"tests-{size}-{secrets.token_hex(4)}")
        self._output = open(directory / f"output-{secrets.token_hex(4)}", "w+b")  # noqa: SIM115
        kept = {name: text for name, text in os.environ.items() if not name.startswith("HOROVOD_")}
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            self._launcher = subprocess.Popen(
                [*LAUNCHER, "-np", str(size), sys.executable, str(WORKER), address, key.hex()],
                env={**kept, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            self._ranks: dict[int, Connection] = {}
            self._pids: dict[int, int] = {}
            # accept() has no time limit of its own
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            try:
                connections = [listener.accept() for _ in range(size)]
                for connection in connections:
                    if not connection.poll(START_S):
                        raise TimeoutError("a rank did not start")
                    rank, pid = connection.recv()
                    self._ranks[rank], self._pids[rank] = connection, pid
            except (OSError, EOFError) as error:
                raise AssertionError(f"the world did not start: {error}\n{self.kill()}") from error

    def run(self, path: str, function: str, kwargs: dict[str, Any]) -> list[Any]:
        """The results by rank; fails with every rank's traceback if one has any."""
        for connection in self._ranks.values():
            connection.send((path, function, kwargs))
        results: dict[int, Any] = {}
        traces: dict[int, str] = {}
        deadline = time.monotonic() + TEST_S
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        while waiting and (left := deadline - time.monotonic()) > 0:
            # Once one has failed the others can't be expected to get through.
            for connection in wait(list(waiting), min(left, 10.0) if traces else left):
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    trace, results[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    trace = "the process ended\n"
                if trace is not None:
                    traces[rank] = trace
                    deadline = min(deadline, time.monotonic() + 10.0)
        if traces or waiting:
            late = sorted(waiting.values())
            output = self.kill(dump=late)
            texts = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(traces.items()))
            still = f"ranks {late} did not come back\n" if late else ""
            pytest.fail(f"{still}{texts}\noutput of the job:\n{output}", pytrace=False)
        return [results[rank] for rank in range(self.size)]

    def dismiss(self) -> None:
        """Tells the ranks to end in good order."""
        for connection in self._ranks.values():
            connection.send(None)

    def stop(self) -> None:
        """Waits until the dismissed ranks have ended."""
        try:
            code = self._launcher.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"a world of {self.size} did not stop\n{self.kill(dump=[*self._ranks])}")
        self.alive = False
        if code:
            pytest.fail(f"a world of {self.size} ended with code {code}\n{self._text()}")

    def kill(self, dump: list[int] | None = None) -> str:
        """Ends the world at once; gives what the job wrote, with the stacks of some ranks."""
        self.alive = False
        for rank in dump or []:
            os.kill(self._pids[rank], signal.SIGUSR1)
        if dump:
            time.sleep(0.5)  # nothing says when the stacks have been written
        self._launcher.terminate()
        try:
            self._launcher.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait(STOP_S)
        return self._text()

    def _text(self) -> str:
        self._output.seek(0)
        return self._output.read().decode("utf-8", "replace")[-20_000:]


class Worlds:
    """The worlds of a session, by size."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hvd")
        self._worlds: dict[int, World] = {}

    def run(
        self,
        size: int,
        path: str,
        function: str,
        kwargs: dict[str, Any],
        fresh: bool = False,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        if fresh or env:
            world = World(size, Path(self._directory.name), env)
            results = world.run(path, function, kwargs)
            world.dismiss()
            world.stop()
            return results
        world = self._worlds.get(size)  # type: ignore[assignment]
        if world is None or not world.alive:
            world = self._worlds[size] = World(size, Path(self._directory.name))
        return world.run(path, function, kwargs)

    def close(self) -> None:
        alive = [world for world in self._worlds.values() if world.alive]
        for world in alive:
            world.dismiss()
        for world in alive:
            world.stop()
        self._directory.cleanup()


_WORLDS = pytest.StashKey[Worlds]()


@pytest.fixture(scope="session", autouse=True)
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    worlds = Worlds()
    request.config.stash[_WORLDS] = worlds
    yield worlds
    worlds.close()


@pytest.fixture
def run_in(request: pytest.FixtureRequest, worlds: Worlds) -> Callable[..., list[Any]]:
    """``run_in(n, function, **kwargs)``: a module-level function, in every rank of a world of n."""
    path = str(request.path)

    def run(size: int, function: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        return worlds.run(size, path, function.__name__, kwargs)

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("np")
    if marker is not None:
        metafunc.fixturenames.append("_np")
        metafunc.parametrize("_np", marker.args, ids=[f"np{size}" for size in marker.args])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("np")
    if marker is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    kwargs = {name: value for name, value in pyfuncitem.callspec.params.items() if name in names}
    worlds = pyfuncitem.config.stash[_WORLDS]
    function = pyfuncitem.originalname
    path = str(pyfuncitem.path)
    worlds.run(pyfuncitem.callspec.params["_np"], path, function, kwargs, **marker.kwargs)
    return True
