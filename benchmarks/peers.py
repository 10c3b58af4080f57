"""The peers as a table: how each is installed and started; imports no library that is measured."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALL_S, COMPILE_S = 900, 180


class Absent(Exception):
    """A peer that can't take part here; the text says why."""


def run(command: Sequence[str], limit_s: float, what: str) -> None:
    """Runs a command that prepares something. Raises Absent."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(f"{what}: {error}") from error
    if done.returncode != 0:
        said = [line.strip() for line in done.stdout.splitlines() if "ERROR" in line.upper()]
        raise Absent(f"{what}: {(said or done.stdout.splitlines() or ['it failed'])[-1][:300]}")


@dataclass(frozen=True)
class Place:
    """Where a peer is installed: the folder of its environment, None for the one we run in."""

    folder: Path | None = None

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python") if self.folder else sys.executable

    @property
    def variables(self) -> dict[str, str]:
        if self.folder is None:
            return {}
        return {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
        }

    def mpiexec(self, *options: str) -> list[str]:
        assert self.folder
        return [str(self.folder / "bin" / "mpiexec"), *options]


@dataclass(frozen=True)
class Peer:
    """How the job of a library is started.

    `launch` gives the command before the program and its arguments, from the number of ranks.
    `packages` are installed into an environment of its own; without any, it runs in ours.
    """

    adapter: str
    launch: Callable[[Place, int], list[str]]
    packages: tuple[str, ...] = ()
    variables: Callable[[Place, int], Mapping[str, str]] = field(default=lambda place, size: {})
    build: Callable[[Path], None] | None = None


def horovodrun(place: Place, size: int) -> list[str]:
    return [place.python, "-m", "horovod.runner", "-np", str(size)]


def local(place: Place, size: int) -> list[str]:
    """Without a launcher of the library's: RANK and WORLD_SIZE, as torchrun sets them."""
    return [place.python, str(HERE / "local.py"), str(size)]


def hydra(place: Place, size: int) -> list[str]:
    return place.mpiexec("-n", str(size))


def crowded(size: int) -> bool:
    """Whether there are more ranks than cores: then who waits should give its core away."""
    return size > len(os.sched_getaffinity(0))


def open_mpi(place: Place, size: int) -> list[str]:
    options = ["--oversubscribe", "--bind-to", "none"]
    if crowded(size):
        options += ["--mca", "mpi_yield_when_idle", "1"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return place.mpiexec(*options, "-n", str(size))


def mpich(place: Place, size: int) -> dict[str, str]:
    throttle = "MPIR_CVAR_CH4_PROGRESS_THROTTLE"
    return {throttle: "1", f"{throttle}_NO_PROGRESS_COUNT": "100"} if crowded(size) else {}


def intel(place: Place, size: int) -> dict[str, str]:
    return {"I_MPI_ROOT": str(place.folder), "I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"}


def oneccl(place: Place, size: int) -> dict[str, str]:
    assert place.folder
    return {
        "I_MPI_ROOT": str(place.folder),
        "I_MPI_PIN": "0",
        "CCL_ROOT": str(place.folder),
        "CCL_ATL_TRANSPORT": "mpi",
        "CCL_YIELD": "sched_yield" if crowded(size) else "pause",
        "CCL_WORKER_OFFLOAD": "0",  # a worker beside each rank would take its core
        "BENCHMARK_ONECCL": str(place.folder / "lib" / "oneccl_benchmark.so"),
    }


def build_oneccl(folder: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        raise Absent("there is no C++ compiler")
    library = folder / "lib"
    source = ["-O2", "-std=c++17", f"-I{folder / 'include'}", str(HERE / "oneccl.cc")]
    linked = [f"-L{library}", "-l:libccl.so.1", f"-Wl,-rpath,{library},--allow-shlib-undefined"]
    target = ["-shared", "-fPIC", "-o", str(library / "oneccl_benchmark.so")]
    run([compiler, *source, *linked, *target], COMPILE_S, "compiling oneccl.cc")


MPI_PACKAGES = ("numpy", "mpi4py")
PEERS = {
    "horovod": Peer("Horovod", horovodrun),
    "horovod-unfused": Peer(
        "Horovod", horovodrun, variables=lambda place, size: {"HOROVOD_FUSION_THRESHOLD": "0"}
    ),
    "horovod-adasum": Peer("HorovodAdasum", horovodrun),
    "limit": Peer("Limit", horovodrun),
    "torch-gloo": Peer("TorchGloo", local),
    "independent": Peer("Independent", local),
    "mpich": Peer("Mpi", hydra, (*MPI_PACKAGES, "mpich"), variables=mpich),
    "openmpi": Peer("Mpi", open_mpi, (*MPI_PACKAGES, "openmpi")),
    "intel-mpi": Peer("Mpi", hydra, (*MPI_PACKAGES, "impi-rt"), variables=intel),
    "oneccl": Peer(
        "OneCcl",
        hydra,
        ("numpy", "oneccl", "oneccl-devel"),
        variables=oneccl,
        build=build_oneccl,
    ),
}


def install(name: str, environments: Path) -> Place:
    """The place of a peer, made if it isn't there yet. Raises Absent."""
    peer = PEERS[name]
    if not peer.packages:
        return Place()
    folder = environments / name
    done = folder / "complete"  # and for which packages
    if not (done.is_file() and done.read_text().split() == list(peer.packages)):
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)], COMPILE_S, "making an environment")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        run([*pip, *peer.packages], INSTALL_S, "pip")
        if peer.build:
            peer.build(folder)
        done.write_text("\n".join(peer.packages))
    return Place(folder)
