"""The examples do what the README says of them.

Two scripts are run as a user would start them. The others run in the ranks of a test world, each
as the main program that it is, since most of their time would go into importing torch once more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from programs import main_program, run

# What trains or starts processes for seconds takes several times as long on a busy machine.
own_processes = pytest.mark.timeout(120)


@own_processes
def test_two_processes_learn_the_digits() -> None:
    output = run(2, "pytorch_digits.py")
    assert all(line.startswith("[0]<stdout>:") for line in output.splitlines())
    accuracies = [float(text) for text in re.findall(r"test accuracy (\d+\.\d+)%", output)]
    assert len(accuracies) == 15
    assert accuracies[-1] > 97.0


@own_processes
def test_one_process_needs_no_launcher() -> None:
    output = run(1, "pytorch_digits.py", "--epochs", "1", "--fp16-allreduce")
    assert output.startswith("1 process,")


@own_processes
def test_the_mnist_style_script_starts_its_own_processes() -> None:
    options = ["--fp16-allreduce", "--gradient-predivide-factor", "2.0", "--lr", "0.05"]
    output = run(1, "pytorch_mnist_style.py", "--num-proc", "2", "--epochs", "2", *options)
    accuracy = last_words(output, r"final accuracy (\d\.\d+)")
    results = re.search(r"accuracies by rank: \[(.*), (.*)\]", output)
    assert results and results[1] == results[2] and f"{float(results[1]):.4f}" == accuracy
    assert float(accuracy) > 0.5


def last_words(output: str, pattern: str) -> str:
    """What each rank said in its last line, which must be the same."""
    said = re.findall(rf"rank \d of 2: {pattern}", output)
    assert len(said) == 2 and said[0] == said[1], output
    return said[0]


Run = Callable[..., list[Any]]


def test_the_synthetic_benchmark(run_in: Run) -> None:
    small = ["--model", "resnet18", "--batch-size", "1", "--image-size", "64"]
    few = ["--num-iters", "2", "--num-batches-per-iter", "1", "--num-warmup-batches", "1"]
    words = [*small, *few, "--fp16-allreduce"]
    output = "".join(run_in(2, main_program, script="pytorch_synthetic_benchmark.py", words=words))
    rates = re.findall(r"(rank \d|total on 2 processes): (\d+\.\d+) \+- \d+\.\d+ images/s", output)
    assert [who for who, _ in rates] == ["rank 0", "rank 1", "total on 2 processes"]
    assert all(float(rate) > 0 for _, rate in rates)


def test_adasum_beside_average(run_in: Run) -> None:
    output = "".join(run_in(2, main_program, script="adasum_small_model.py", words=[]))
    losses = re.findall(r"(Adasum|Average): loss (\d\.\d+) after", output)
    assert [name for name, _ in losses] == ["Adasum", "Average"]
    assert all(float(loss) < 0.2 for _, loss in losses)  # 0.4 before training


def test_the_imagenet_style_script_resumes(run_in: Run, tmp_path: Path) -> None:
    def train(epochs: str) -> str:
        words = ["--images", "96", "--checkpoints", str(tmp_path), "--epochs", epochs]
        return "".join(run_in(2, main_program, script="pytorch_imagenet_style.py", words=words))

    last_words(train("1"), r"resumed from epoch 0, (.*)")
    output = train("2")
    last_words(output, r"resumed from epoch 1, (.*)")
    assert "epoch 1:" not in output and "epoch 2:" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pt", "2.pt"]


@own_processes  # importing Lightning takes longer than importing torch
def test_lightning_trains_with_a_wrapped_optimizer(run_in: Run) -> None:
    words = ["--epochs", "2"]
    output = "".join(run_in(2, main_program, script="pytorch_lightning.py", words=words))
    assert float(last_words(output, r"accuracy (\d\.\d+), .*")) > 0.5
