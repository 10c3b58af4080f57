"""The examples do what the README says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCHER = (sys.executable, "-m", "horovod.runner")


def run(n: int, script: str, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(
        command if n == 1 else [*LAUNCHER, "-np", str(n), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=58,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_processes_learn_the_digits() -> None:
    started = time.monotonic()
    output = run(2, "pytorch_digits.py")
    assert time.monotonic() - started < 55
    assert all(line.startswith("[0]<stdout>:") for line in output.splitlines())
    accuracies = [float(text) for text in re.findall(r"test accuracy (\d+\.\d+)%", output)]
    assert len(accuracies) == 15
    assert accuracies[-1] > 97.0


def test_one_process_needs_no_launcher() -> None:
    output = run(1, "pytorch_digits.py", "--epochs", "1", "--fp16-allreduce")
    assert output.startswith("1 process,")


def test_the_synthetic_benchmark() -> None:
    small = ["--model", "resnet18", "--batch-size", "1", "--image-size", "64"]
    few = ["--num-iters", "2", "--num-batches-per-iter", "1", "--num-warmup-batches", "1"]
    output = run(2, "pytorch_synthetic_benchmark.py", *small, *few, "--fp16-allreduce")
    rates = re.findall(r"(rank \d|total on 2 processes): (\d+\.\d+) \+- \d+\.\d+ images/s", output)
    assert [who for who, _ in rates] == ["rank 0", "rank 1", "total on 2 processes"]
    assert all(float(rate) > 0 for _, rate in rates)


def test_adasum_beside_average() -> None:
    losses = re.findall(r"(Adasum|Average): loss (\d\.\d+) after", run(2, "adasum_small_model.py"))
    assert [name for name, _ in losses] == ["Adasum", "Average"]
    assert all(float(loss) < 0.2 for _, loss in losses)  # 0.4 before training
