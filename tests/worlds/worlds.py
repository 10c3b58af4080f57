"""Runs tests in several ranks under our own launcher; must not import any framework.

A test marked ``np(n)`` runs in every rank of a world of n processes; ``np(2, 3)`` runs it in both
worlds. Worlds are started once and serve many tests, since importing a framework takes seconds; a
world in which a test failed is ended, and a new one takes its place. ``np(2, fresh=True)`` gives a
test a world of its own. ``np(2, env={...})`` gives it an ``init()`` of its own with variables of
Horovod's besides, or none; other variables need a world of their own. The fixture ``run_in`` runs a
module-level function in a world and gives the results by rank.

Which frameworks a world has is its *flavour*: that of the test's folder, or those of the marker
``flavour("keras3")`` on a test or, as ``pytestmark``, on a module. A test with several flavours is
run in each.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = (sys.executable, "-m", "horovod.runner")
RANK = Path(__file__).with_name("rank.py")
TEST_S = 45.0
STOP_S = 15.0
MOST_RANKS = 12  # that wait for work at a time; each takes up to 0.7 GB


@dataclass(frozen=True)
class Flavour:
    """What the ranks of a world have imported."""

    frameworks: tuple[str, ...]
    start_s: float  # limit of a start, on a machine with much other work
    env: Mapping[str, str] = field(default_factory=dict)


QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
FLAVOURS = {
    "torch": Flavour(("torch",), 40.0),
    "keras3": Flavour(("tensorflow",), 100.0, QUIET),
    "tf_keras": Flavour(("tensorflow",), 100.0, {**QUIET, "TF_USE_LEGACY_KERAS": "1"}),
    "keras3_on_torch": Flavour(("torch",), 60.0, {"KERAS_BACKEND": "torch"}),
    "torch_and_tensorflow": Flavour(("torch", "tensorflow"), 120.0, QUIET),
}
OF_FOLDER = {"torch": ["torch"], "tensorflow": ["keras3"], "keras": ["keras3", "tf_keras"]}


class World:
    """n ranks of one flavour that wait for work."""

    def __init__(
        self, size: int, flavour: Flavour, directory: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.size = size
        self.alive = True
        key = secrets.token_bytes(16)
        address = str(directory / f"tests-{size}-{secrets.token_hex(4)}")
        self._output = open(directory / f"output-{secrets.token_hex(4)}", "w+b")  # noqa: SIM115
        kept = {name: text for name, text in os.environ.items() if not name.startswith("HOROVOD_")}
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            rank = [sys.executable, str(RANK), address, key.hex(), *flavour.frameworks]
            self._launcher = subprocess.Popen(
                [*LAUNCHER, "-np", str(size), *rank],
                env={**kept, "OMP_NUM_THREADS": "1", **flavour.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            self._ranks: dict[int, Connection] = {}
            self._pids: dict[int, int] = {}
            # accept() has no time limit of its own
            listener._listener._socket.settimeout(flavour.start_s)  # type: ignore[attr-defined]
            try:
                connections = [listener.accept() for _ in range(size)]
                for connection in connections:
                    if not connection.poll(flavour.start_s):
                        raise TimeoutError("a rank did not start")
                    rank, pid = connection.recv()
                    self._ranks[rank], self._pids[rank] = connection, pid
            except (OSError, EOFError) as error:
                raise AssertionError(f"the world did not start: {error}\n{self.kill()}") from error

    def run(
        self,
        path: str,
        function: str,
        kwargs: dict[str, Any],
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """The results by rank; fails with every rank's traceback if one has any."""
        for connection in self._ranks.values():
            connection.send((path, function, kwargs, env))
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

    def stop(self) -> None:
        """Tells the ranks to end in good order, and waits until they have.

        One world at a time: all of them together would have to share the processors, and the limit.
        """
        for connection in self._ranks.values():
            connection.send(None)
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
    """The worlds of a session, by flavour and size; those used last are kept."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hvd")
        self._worlds: dict[tuple[str, int], World] = {}

    def run(
        self,
        size: int,
        path: str,
        function: str,
        kwargs: dict[str, Any],
        *,
        flavour: str = "torch",
        fresh: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """The results by rank of a function of the module at `path`."""
        if fresh or not all(name.startswith("HOROVOD_") for name in env or {}):
            world = World(size, FLAVOURS[flavour], Path(self._directory.name), env)
            results = world.run(path, function, kwargs)
            world.stop()
            return results
        return self._world(flavour, size).run(path, function, kwargs, env)

    def _world(self, flavour: str, size: int) -> World:
        world = self._worlds.pop((flavour, size), None)
        self._worlds = {key: other for key, other in self._worlds.items() if other.alive}
        if world is None or not world.alive:
            while self._worlds and size + sum(n for _, n in self._worlds) > MOST_RANKS:
                self._worlds.pop(next(iter(self._worlds))).stop()
            world = World(size, FLAVOURS[flavour], Path(self._directory.name))
        self._worlds[flavour, size] = world  # the last one, as the one used last
        return world

    def close(self) -> None:
        """Ends all worlds in good order."""
        for world in self._worlds.values():
            if world.alive:
                world.stop()
        self._directory.cleanup()


_WORLDS = pytest.StashKey[Worlds]()


def flavours_of(item: pytest.Item) -> list[str]:
    """Those of the closest marker, or of the folder."""
    marker = item.get_closest_marker("flavour")
    return list(marker.args) if marker else OF_FOLDER.get(item.path.parent.name, ["torch"])


def flavour_of(item: pytest.Item) -> str:
    """The flavour that one run of a test has."""
    callspec = getattr(item, "callspec", None)
    chosen = callspec.params.get("_flavour") if callspec else None
    return chosen or flavours_of(item)[0]


@pytest.fixture(scope="session", autouse=True)
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """For tests that need more than ``np`` and ``run_in`` give."""
    worlds = Worlds()
    request.config.stash[_WORLDS] = worlds
    yield worlds
    worlds.close()


@pytest.fixture
def run_in(request: pytest.FixtureRequest, worlds: Worlds) -> Callable[..., list[Any]]:
    """``run_in(n, function, **kwargs)``: a function of a file, in every rank of a world of n."""
    flavour = flavour_of(request.node)

    def run(size: int, function: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        path = inspect.getfile(function)
        return worlds.run(size, path, function.__name__, kwargs, flavour=flavour)

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("np")
    if marker is not None:
        metafunc.fixturenames.append("_np")
        metafunc.parametrize("_np", marker.args, ids=[f"np{size}" for size in marker.args])
    flavours = flavours_of(metafunc.definition)
    if len(flavours) > 1 and {"_np", "run_in"} & set(metafunc.fixturenames):
        metafunc.fixturenames.append("_flavour")
        metafunc.parametrize("_flavour", flavours)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that may have to start a world of slow imports has the time for it besides."""
    for item in items:
        in_world = {"_np", "run_in"} & set(getattr(item, "fixturenames", ()))
        start_s = FLAVOURS[flavour_of(item)].start_s if in_world else 0.0
        if start_s > TEST_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(start_s + TEST_S + STOP_S))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("np")
    if marker is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    kwargs = {name: value for name, value in pyfuncitem.callspec.params.items() if name in names}
    worlds = pyfuncitem.config.stash[_WORLDS]
    worlds.run(
        pyfuncitem.callspec.params["_np"],
        str(pyfuncitem.path),
        pyfuncitem.originalname,
        kwargs,
        flavour=flavour_of(pyfuncitem),
        **marker.kwargs,
    )
    return True
