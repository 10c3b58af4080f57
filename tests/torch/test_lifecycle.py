"""Starting, ending, forking and dying: nothing hangs, nothing leaks, errors say who."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from horovod.common.exceptions import PeerLostError, ShutdownError

LAUNCHER = (sys.executable, "-m", "horovod.runner")


def held() -> tuple[dict[str, int], int]:
    """What this process holds: threads, descriptors and listening sockets; and mappings."""
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    tables = [(path, "0A", 9) for path in Path("/proc/self/net").glob("tcp*")]
    listening = {
        f"socket:[{words[inode]}]"
        for path, accepts, inode in [*tables, (Path("/proc/self/net/unix"), "00010000", 6)]
        for words in map(str.split, path.read_text().splitlines())
        if words[3] == accepts
    }
    kinds = {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(files),
        "listening": len(listening.intersection(files)),
    }
    return kinds, len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.np(1, 2)
def test_init_and_shutdown_again_and_again() -> None:
    place = hvd.rank(), hvd.size()
    gc.disable()  # what is let go must be free without it
    for cycle in range(50):
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == place
        one = torch.ones(100)
        assert hvd.allreduce(one, op=hvd.Sum).sum().item() == 100 * hvd.size()
        hvd.allgather(one)
        hvd.broadcast_(one, 0)
        if cycle == 9:
            before = held()
    kinds, mappings = held()
    gc.enable()
    assert kinds == before[0], (before, kinds)
    assert mappings <= before[1] + 4, (before, mappings)  # the allocator's own may still grow


@pytest.mark.np(2)
def test_calls_without_init_say_so_and_a_child_may_outlive_shutdown() -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    started = time.monotonic()
    hvd.shutdown()
    for call in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allreduce_async(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_parameters({"a": torch.ones(1)}, 0),
        hvd.barrier,
        hvd.join,
    ):
        with pytest.raises(ShutdownError, match="init"):
            call()
    for question in (hvd.rank, hvd.size, hvd.local_rank):
        with pytest.raises(ValueError, match="init"):
            question()
    hvd.init()
    assert time.monotonic() - started < 10
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    assert child.is_alive()
    child.terminate()
    child.join()


@pytest.mark.np(2)
def test_init_in_a_thread() -> None:
    hvd.shutdown()
    thread = threading.Thread(target=hvd.init)
    thread.start()
    thread.join()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


@pytest.mark.np(2)
def test_handles_that_outlive_their_engine() -> None:
    done = hvd.allreduce_async(torch.ones(3), name="done")
    pending = hvd.allreduce_async(torch.ones(3), name=f"only on {hvd.rank()}")
    while not hvd.poll(done):
        time.sleep(0.001)
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(ShutdownError):
        hvd.synchronize(pending)
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    assert hvd.synchronize(done) is None


@pytest.mark.np(2)
def test_a_forked_child_is_inert() -> None:
    pending = hvd.allreduce_async(torch.ones(1000), name="pending")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (
            lambda: hvd.allreduce(torch.ones(1)),
            lambda: hvd.synchronize(pending),
            lambda: hvd.poll(pending),
            hvd.barrier,
            lambda: hvd.broadcast_object(1),
            hvd.init,
        ):
            try:
                call()
                said.append("nothing")
            except ShutdownError as error:
                said.append("forked" if "forked" in str(error) else str(error))
        os.write(write, " ".join([*said, str(hvd.rank() >= 0)]).encode())
        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read().split()
    assert said == ["forked"] * 6 + ["True"]
    _, status = os.waitpid(child, 0)
    assert status == 0
    hvd.synchronize(pending)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


def square(x: int) -> int:
    return x * x


@pytest.mark.np(2)
@pytest.mark.parametrize("kind", ["fork", "forkserver", "spawn"])
def test_data_loaders_of_every_kind(kind: str) -> None:
    """On rank 0; rank 1's workers are forked, since others import torch, which takes seconds."""
    multiprocessing.set_forkserver_preload(["torch"])  # once, not in each of its workers
    loader = DataLoader(
        TensorDataset(torch.arange(16.0)),
        batch_size=4,
        num_workers=4,
        multiprocessing_context="fork" if hvd.rank() else kind,
    )
    batches = [hvd.allreduce(batch, name="batch") for (batch,) in loader]
    assert torch.cat(batches).tolist() == list(range(16))


@pytest.mark.np(2)
def test_a_pool_of_forked_processes() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(square, [1, 2, 3]) == [1, 4, 9]
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


def job(tmp_path: Path, n: int, text: str) -> subprocess.CompletedProcess[str]:
    """Runs the text in n ranks; each is a shell's child, so that somebody notes when it has ended.

    What a rank prints by `last()` and what its shell prints then are read by `seconds_to_end`.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, signal, sys, threading, time\nimport torch\n"
        "import horovod.torch as hvd\n"
        "last = lambda: print('last statement', time.time(), flush=True)\n"
        "hvd.init()\nr = hvd.rank()\n" + text
    )
    rank = f"{sys.executable} {script}; code=$?; echo ended $(date +%s.%N); exit $code"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    return subprocess.run(
        [*LAUNCHER, "-np", str(n), "sh", "-c", rank],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        stdin=subprocess.DEVNULL,
    )


def seconds_to_end(output: str) -> list[float]:
    """By rank, from its last statement until its process had ended; of those that both is known."""
    times: dict[str, dict[int, float]] = {}
    for rank, what, when in re.findall(r"\[(\d+)\]<stdout>:(last|ended).* (\d+\.\d+)", output):
        times.setdefault(what, {})[int(rank)] = float(when)
    return [times["ended"][rank] - start for rank, start in sorted(times["last"].items())]


def test_a_killed_rank_with_loader_workers_is_named_within_a_second(tmp_path: Path) -> None:
    done = job(
        tmp_path,
        3,
        """
from torch.utils.data import DataLoader
if r == 1:
    loader = iter(DataLoader(list(range(10**6)), num_workers=4, prefetch_factor=2))
    next(loader)
hvd.barrier()
started = time.monotonic()
if r == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for call in (lambda: hvd.allreduce(torch.ones(3)), lambda: hvd.allgather(torch.ones(3))):
    try:
        call()
        print("NO ERROR")
    except hvd.HorovodInternalError as error:
        took = time.monotonic() - started
        print(f"{type(error).__name__} rank={error.rank} soon={took < 1.0}", flush=True)
os._exit(0)
""",
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert done.stdout.count("PeerLostError rank=1 soon=True") == 4, done.stdout + done.stderr


def test_every_way_to_exit_with_operations_in_flight(tmp_path: Path) -> None:
    done = job(
        tmp_path,
        4,
        """
if (child := os.fork()) == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for i in range(20):
    hvd.allreduce_async(torch.ones(10**5), name=str(i))
hvd.allreduce_async(torch.ones(3), name=f"only on {r}")
hvd.barrier()  # so that nobody is gone before another has submitted
if r == 1:
    threading.Thread(target=lambda: time.sleep(0.5)).start()
if r == 2:
    multiprocessing.get_context("fork").Process(
        target=time.sleep, args=(30,), daemon=True
    ).start()
last()
if r == 3:
    os._exit(0)
""",
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    took = seconds_to_end(done.stdout)
    assert len(took) == 4 and max(took) < 5, took


def test_an_exception_with_operations_in_flight_is_the_cause(tmp_path: Path) -> None:
    done = job(
        tmp_path,
        2,
        """
hvd.allreduce_async(torch.ones(3), name=f"only on {r}")
if r == 1:
    last()
    raise KeyError("the cause")
hvd.allreduce(torch.ones(3))
""",
    )
    assert done.returncode == 1
    assert "KeyError: 'the cause'" in done.stderr
    assert f"{PeerLostError.__name__}: " in done.stderr and "rank 1" in done.stderr
    (took,) = seconds_to_end(done.stdout)
    assert took < 5, took


def test_torch_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.torch"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "horovod.torch needs PyTorch" in done.stderr and "pip install" in done.stderr


def test_python_threads_run_while_another_waits(
    run_in: Callable[..., list[Any]], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    run_in(2, waits, go=tmp_path / "go")


def waits(go: Path) -> None:
    """Rank 0 waits for rank 1, which starts only when rank 0's other thread says so."""

    def tick() -> None:
        for _ in range(50):  # the call waits by then
            time.sleep(0.001)
        go.write_text("go")

    if hvd.rank() == 1:
        go.read_text()
    else:
        threading.Thread(target=tick).start()
    hvd.allreduce(torch.ones(1), name="late")
