"""Models and data that are small enough for many trainings, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd

K = tf.keras
KERAS3 = not K.Model.__module__.startswith("tf_keras.")
ROWS = 2  # of a rank's batch


def data(net: str, batches: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets of all ranks, of shape (batches, ranks, rows, features)."""
    draw = np.random.default_rng(5)
    shape = batches, hvd.size(), ROWS
    if net == "embedding":
        x: Any = draw.integers(0, 6, (*shape, 3))
    else:
        x = draw.normal(size=(*shape, 3))
    return x, draw.normal(size=(*shape, 1))


def own(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """This rank's rows, batch after batch."""
    return values[:, hvd.rank()].reshape(-1, values.shape[-1])


def joined(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows of all ranks, batch after batch."""
    return values.reshape(-1, values.shape[-1])


def model(net: str = "dense", base: Any = None) -> Any:
    """A built model with the same weights on every rank."""
    layers = K.layers
    first: list[Any] = [layers.Dense(4, activation="tanh", dtype="float64")]
    if net == "embedding":
        first = [layers.Embedding(6, 2, dtype="float64"), layers.Flatten(dtype="float64")]
    kind = base or K.Sequential
    dtype = "int32" if net == "embedding" else "float64"
    made = kind([K.Input((3,), dtype=dtype), *first, layers.Dense(1, dtype="float64")])
    draw = np.random.default_rng(9)
    made.set_weights([draw.normal(size=one.shape) for one in made.get_weights()])
    return made


def weights(of: Any) -> np.ndarray[Any, Any]:
    """All weights of a model, or values of a list of variables, in one row."""
    values = of.get_weights() if hasattr(of, "get_weights") else [np.asarray(one) for one in of]
    return np.concatenate([np.ravel(value) for value in values])


def same_everywhere(values: np.ndarray[Any, Any]) -> None:
    """Every rank has these numbers, bit for bit."""
    rows = np.asarray(hvd.allgather(values[None]))
    for row in rows:
        np.testing.assert_array_equal(row, rows[0])


def equal(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def different(found: Any, expected: Any, tolerance: float = 1e-9) -> bool:
    return not np.allclose(found, expected, rtol=tolerance, atol=tolerance)


def iterations(optimizer: Any) -> int:
    return int(np.asarray(optimizer.iterations))


def variables(*shapes: Sequence[int], dtype: str = "float64") -> list[Any]:
    """Variables as a model of this Keras has, with equal values on every rank."""
    draw = np.random.default_rng(3)
    values = [draw.normal(size=shape) for shape in shapes]
    if KERAS3:
        return [K.Variable(value, dtype=dtype, name=f"v{i}") for i, value in enumerate(values)]
    return [tf.Variable(value.astype(dtype), name=f"v{i}") for i, value in enumerate(values)]


def gradients(of: Sequence[Any], step: int, rank: int) -> list[Any]:
    """What a rank's backward pass might give in a step."""
    draw = np.random.default_rng((step, rank))
    return [tf.constant(draw.normal(size=tuple(one.shape)), one.dtype) for one in of]


def mean_gradients(of: Sequence[Any], step: int) -> list[Any]:
    """The mean over all ranks of `gradients`."""
    each = [gradients(of, step, rank) for rank in range(hvd.size())]
    return [tf.add_n(list(ones)) / hvd.size() for ones in zip(*each, strict=True)]


def keras_backing(variable: Any) -> Any:
    """The tf.Variable of a variable."""
    return variable.value if KERAS3 else variable
