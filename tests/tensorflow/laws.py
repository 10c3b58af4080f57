"""What the tests of gradients share: data of each rank, a small model, comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.util import backing

ROWS, WORDS, WIDTH = 4, 6, 3


def near(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Equal within `tolerance` of the largest value expected, in shape and type too."""
    if expected is None:
        assert actual is None
        return
    actual, expected = tf.convert_to_tensor(actual), tf.convert_to_tensor(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    limit = tolerance * max(1.0, float(np.max(np.abs(expected.numpy()), initial=0.0)))
    np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=0, atol=limit)


def data(rank: int, step: int = 0, rows: int = ROWS) -> tuple[Any, Any, Any]:
    """A rank's batch: words, numbers and targets."""
    random = np.random.default_rng([rank, step])
    words = random.integers(0, WORDS, rows)
    return (
        tf.constant(words),
        tf.constant(random.normal(size=(rows, WIDTH))),
        tf.constant(random.normal(size=(rows, 1))),
    )


def joined(step: int = 0, rows: int = ROWS) -> tuple[Any, Any, Any]:
    """The batches of all ranks, one after the other."""
    parts = [data(rank, step, rows) for rank in range(hvd.size())]
    return tuple(tf.concat(part, 0) for part in zip(*parts, strict=True))  # type: ignore[return-value]


class Model:
    """An embedding and two layers in float64, the same at the start on every rank.

    ``unused`` never has a gradient.
    """

    def __init__(self, variable: Any = tf.Variable) -> None:
        random = np.random.default_rng(7)
        self.table = variable(random.normal(size=(WORDS, WIDTH)))
        self.hidden = variable(random.normal(size=(WIDTH, WIDTH)))
        self.unused = variable(random.normal(size=(2,)))
        self.output = variable(random.normal(size=(WIDTH, 1)))
        self.variables = [self.table, self.hidden, self.unused, self.output]

    def loss(self, words: Any, numbers: Any, targets: Any) -> Any:
        inputs = tf.nn.embedding_lookup(backing(self.table), words)
        inputs = tf.tanh((inputs + numbers) @ tf.convert_to_tensor(self.hidden))
        return tf.reduce_mean(tf.square(inputs @ tf.convert_to_tensor(self.output) - targets))

    def state(self) -> list[Any]:
        return [tf.convert_to_tensor(variable).numpy() for variable in self.variables]


def gradients(model: Model, batch: tuple[Any, Any, Any]) -> list[Any]:
    """Those of one process, as a plain tape gives them."""
    with tf.GradientTape() as tape:
        loss = model.loss(*batch)
    return tape.gradient(loss, [backing(variable) for variable in model.variables])


def descend(model: Model, grads: list[Any], rate: float = 0.5) -> None:
    """A step of gradient descent, with no optimizer in between."""
    for variable, grad in zip(model.variables, grads, strict=True):
        if grad is not None:
            variable.assign(tf.convert_to_tensor(variable) - rate * tf.convert_to_tensor(grad))


def everywhere(value: Any) -> None:
    """The same on all ranks, bit for bit."""
    mine = np.asarray(value)
    for other in hvd.allgather_object(mine):
        np.testing.assert_array_equal(mine, other)
