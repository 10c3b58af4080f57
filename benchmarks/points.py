"""What is measured, as plain data: points, suites and results; knows no library and no clock."""

from __future__ import annotations

from dataclasses import dataclass

from horovod.bench.points import MODELS, SIZES_BYTES, size_text

KIB, MIB = 1 << 10, 1 << 20
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Point:
    """One column of a table.

    Its `kind` says what an iteration is: "tensor", one blocking allreduce of float32; "set", the
    gradients of a model, the last layer first, until all are there; "training", a few steps;
    "none", that the suite has a way of its own.
    """

    name: str
    kind: str
    counts: tuple[int, ...] = ()  # elements of each tensor
    model: str = ""  # a row of MODELS in training.py

    @property
    def size_bytes(self) -> int:
        return sum(self.counts) * FLOAT_BYTES


@dataclass(frozen=True)
class Suite:
    """One table for each number of processes.

    `ratios` are pairs (rows, reference): "*" means every row. `peers` are all that can take part.
    """

    name: str
    title: str
    text: str
    unit: str  # "s", "samples/s" or "MiB"
    peers: tuple[str, ...]
    points: tuple[Point, ...] = ()
    ratios: tuple[tuple[str, str], ...] = ()
    plot: str = "bars"  # or "lines": by the sizes of the points


@dataclass(frozen=True)
class Result:
    """All samples of one cell, in the unit of its suite."""

    suite: str
    np: int
    row: str
    column: str
    samples: list[float]


@dataclass(frozen=True)
class Absence:
    """Who didn't take part, or not to the end, and why; np is 0 if with any number of processes."""

    np: int
    peer: str
    reason: str

    def __str__(self) -> str:
        where = f", {self.np} processes" if self.np else ""
        return f"{self.peer}{where}: {self.reason}"


def tensor(size_bytes: int) -> Point:
    return Point(size_text(size_bytes), "tensor", (size_bytes // FLOAT_BYTES,))


def gradients(model: str) -> Point:
    counts = MODELS[model]()
    size_mb = sum(counts) * FLOAT_BYTES / 1e6
    return Point(f"{model}: {len(counts)} tensors, {size_mb:.0f} MB", "set", tuple(counts))


SETS = tuple(gradients(model) for model in MODELS)
REDUCING = ("horovod", "torch-gloo", "mpich", "openmpi", "intel-mpi", "oneccl")
OPTIONAL = ("horovod-adasum",)  # takes part where it is asked for

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="sizes",
            title="Allreduce of one float32 tensor",
            text="Blocking, in place, one after the other.",
            unit="s",
            peers=(*REDUCING, *OPTIONAL, "limit"),
            points=tuple(tensor(size_bytes) for size_bytes in SIZES_BYTES),
            ratios=(("*", "horovod"), ("horovod", "limit")),
            plot="lines",
        ),
        Suite(
            name="sets",
            title="Allreduce of the gradients of a model",
            text="Each by itself and asynchronously, the last layer first, until all are there; "
            "`grouped`: one call for all; `buckets`: copied into buckets of 1 and 25 MiB and "
            "back, as DistributedDataParallel does; `fused`: copied into 64 MiB and back.",
            unit="s",
            peers=(*REDUCING, *OPTIONAL, "limit"),
            points=SETS,
            ratios=(("*", "horovod"), ("horovod", "limit")),
        ),
        Suite(
            name="negotiation",
            title="Many small tensors in a step",
            text="As the sets of gradients; `horovod-unfused` has HOROVOD_FUSION_THRESHOLD=0.",
            unit="s",
            peers=("horovod", "horovod-unfused", *REDUCING[1:]),
            points=(
                Point("161 of 1 KiB", "set", (KIB // FLOAT_BYTES,) * 161),
                Point("1,000 of 4 KiB", "set", (4 * KIB // FLOAT_BYTES,) * 1000),
            ),
            ratios=(("*", "horovod"),),
        ),
        Suite(
            name="training",
            title="Training, one thread a rank",
            text="Samples a second of all ranks. `independent`: single processes at once that "
            "share nothing; `torch-gloo`: DistributedDataParallel.",
            unit="samples/s",
            peers=("independent", "horovod", "torch-gloo"),
            points=tuple(Point(model, "training", model=model) for model in ("mlp", "wide", "cnn")),
            ratios=(("*", "independent"),),
        ),
        Suite(
            name="memory",
            title="Memory of a rank beyond the tensors that are reduced",
            text="Proportional set size (PSS) less the size of the tensors; "
            "after the first column, what has come on top of it.",
            unit="MiB",
            peers=("horovod", "torch-gloo"),
            points=(
                Point("before init", "none"),
                Point("init", "none"),
                tensor(64 * MIB),
                SETS[-1],
            ),
        ),
        Suite(
            name="launch",
            title="Start and init of all processes",
            text="Whole commands, from their start to their end. `torchrun`: with "
            "`init_process_group` over gloo. A row `a - b` is the difference within a round.",
            unit="s",
            peers=(),
            points=(Point("wall time", "none"),),
            ratios=(
                ("torchrun", "horovodrun"),
                ("torchrun - import torch", "horovodrun - import torch"),
            ),
        ),
    )
}
