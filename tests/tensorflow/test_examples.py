"""The examples for TensorFlow and Keras do what the README says, in the ranks of a world."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from programs import main_program

Run = Callable[..., list[Any]]

FEW = ["--num-iters", "2", "--num-batches-per-iter", "1", "--num-warmup-batches", "1"]


def predictions(path: str) -> tuple[str, list[list[float]]]:
    """Of a saved model on made-up images, and the module of its optimizer's class."""
    import tensorflow as tf

    model = tf.keras.models.load_model(path)
    module = type(model.optimizer).__module__
    return module, model.predict(tf.ones((2, 8, 8, 1)), verbose=0).tolist()


@pytest.mark.flavour("keras3", "tf_keras")
def test_fit_learns_the_digits_and_rank_0_saves_them(run_in: Run, tmp_path: Path) -> None:
    saved = str(tmp_path / "digits.keras")
    words = ["--epochs", "3", "--fp16-allreduce", "--save", saved]
    output = run_in(2, main_program, script="tensorflow2_keras_digits.py", words=words)
    accuracies = re.findall(r"2 processes: test accuracy (\d+\.\d+)%", output[0])
    assert len(accuracies) == 1 and output[1] == ""
    assert float(accuracies[0]) > 90.0
    (module, numbers), others = run_in(2, predictions, path=saved)
    assert "horovod" not in module  # a plain optimizer
    assert others == (module, numbers)


def test_a_loop_with_the_tape_learns_the_digits(run_in: Run) -> None:
    words = ["--epochs", "4"]
    output = "".join(run_in(2, main_program, script="tensorflow2_digits.py", words=words))
    accuracies = re.findall(r"epoch +(\d)/4 .* test accuracy (\d+\.\d+)%", output)
    assert [epoch for epoch, _ in accuracies] == ["1", "2", "3", "4"]
    assert float(accuracies[-1][1]) > 90.0


def test_the_synthetic_benchmark(run_in: Run) -> None:
    words = [
        "--model",
        "small",
        "--batch-size",
        "1",
        "--image-size",
        "32",
        *FEW,
        "--fp16-allreduce",
    ]
    script = "tensorflow2_synthetic_benchmark.py"
    output = "".join(run_in(2, main_program, script=script, words=words))
    rates = re.findall(r"(rank \d|total on 2 processes): (\d+\.\d+) \+- \d+\.\d+ images/s", output)
    assert [who for who, _ in rates] == ["rank 0", "rank 1", "total on 2 processes"]
    assert all(float(rate) > 0 for _, rate in rates)
