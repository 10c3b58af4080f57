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


def last_words(output: str, pattern: str) -> list[str]:
    """What each rank said in its last line, which must be the same."""
    said = re.findall(rf"rank \d of 2: {pattern}", output)
    assert len(said) == 2 and said[0] == said[1], output
    return said


def test_the_mnist_style_script_starts_its_own_processes() -> None:
    output = run(1, "pytorch_mnist_style.py", "--num-proc", "2", "--epochs", "2", "--lr", "0.05")
    accuracy = last_words(output, r"final accuracy (\d\.\d+)")[0]
    results = re.search(r"accuracies by rank: \[(.*), (.*)\]", output)
    assert results and results[1] == results[2] and f"{float(results[1]):.4f}" == accuracy
    assert float(accuracy) > 0.5


def test_the_mnist_style_script_takes_options_of_the_optimizer() -> None:
    options = ["--fp16-allreduce", "--gradient-predivide-factor", "2.0"]
    output = run(2, "pytorch_mnist_style.py", "--epochs", "1", *options)
    last_words(output, r"final accuracy (.*)")


def test_the_imagenet_style_script_resumes(tmp_path: Path) -> None:
    words = ["--images", "96", "--checkpoints", str(tmp_path), "--epochs"]
    last_words(run(2, "pytorch_imagenet_style.py", *words, "1"), r"resumed from epoch 0, (.*)")
    output = run(2, "pytorch_imagenet_style.py", *words, "2")
    last_words(output, r"resumed from epoch 1, (.*)")
    assert "epoch 1:" not in output and "epoch 2:" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pt", "2.pt"]


def test_lightning_trains_with_a_wrapped_optimizer() -> None:
    output = run(2, "pytorch_lightning.py", "--epochs", "2")
    accuracy = last_words(output, r"accuracy (\d\.\d+), .*")[0]
    assert float(accuracy) > 0.5
