"""Gradients of every collective against central differences of the sum of all ranks' losses.

They are those of Horovod 0.28: of that sum for allreduce and alltoall, of the mean for gathers and
broadcast, and of the sum times the number of ranks for reducescatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

STEP = 1e-4


def weight(seed: int) -> tf.Tensor:
    """Other weights on every rank, so that a gradient knows where it came from."""
    return tf.constant(np.random.default_rng([seed, hvd.rank()]).standard_normal(60))


def weighted(outputs: Any) -> tf.Tensor:
    total = tf.constant(0.0, tf.float64)
    for i, output in enumerate(tf.nest.flatten(outputs)):
        values = tf.reshape(output, [-1])
        total += tf.reduce_sum(values * values * weight(i)[: tf.size(values)])
    return total


def splits() -> list[int]:
    return [hvd.rank() + 1] + [1] * (hvd.size() - 1)


FORMS: dict[str, Callable[[tf.Tensor], Any]] = {
    "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "mean": lambda x: hvd.allreduce(x, prescale_factor=0.3, postscale_factor=7.0),
    "group": lambda x: hvd.grouped_allreduce([x, x * 2.0], op=hvd.Sum),
    "gather": lambda x: hvd.allgather(x[: hvd.rank() + 1]),
    "gathers": lambda x: hvd.grouped_allgather([x, x[: hvd.rank()]]),
    "broadcast": lambda x: hvd.broadcast(x, hvd.size() - 1),
    "alltoall": lambda x: hvd.alltoall(tf.concat([x] * hvd.size(), 0)),
    "splits": lambda x: hvd.alltoall(tf.concat([x] * 3, 0), splits())[0],
    "scatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5),
    "scatter mean": lambda x: hvd.reducescatter(x, postscale_factor=3.0),
    "scatters": lambda x: hvd.grouped_reducescatter([x, x * x]),
    "slices": lambda x: hvd.allreduce(tf.IndexedSlices(x, tf.range(3), tf.constant([3, 2]))).values,
}

POWERS = {"gather": -1, "gathers": -1, "broadcast": -1, "slices": -1, "scatter": 1, "scatters": 1}
"""Of the number of ranks, in the factor of the gradient of all losses' sum."""


@pytest.mark.np(1, 2, 3)
@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_gradients(mode: str) -> None:
    """Each rank moves its own input; the others follow with their unmoved ones."""
    start = np.random.default_rng([9, hvd.rank()]).standard_normal([3, 2])
    for name, form in FORMS.items():

        def loss(x: tf.Tensor, form: Callable[[tf.Tensor], Any] = form) -> tf.Tensor:
            return weighted(form(x))

        def gradient(x: tf.Tensor, loss: Any = loss) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(x)
            return tf.convert_to_tensor(tape.gradient(value, x))

        evaluate = tf.function(loss) if mode == "traced" else loss
        differentiate = tf.function(gradient) if mode == "traced" else gradient
        got = differentiate(tf.constant(start)).numpy()
        for mover in range(hvd.size()):
            for i, j in ((0, 0), (2, 1)):
                values = []
                for side in (STEP, -STEP):
                    moved = start.copy()
                    moved[i, j] += side if hvd.rank() == mover else 0.0
                    mine = evaluate(tf.constant(moved))
                    values.append(hvd.allreduce(mine, op=hvd.Sum, name="loss").numpy())
                slope = (values[0] - values[1]) / (2 * STEP)
                if hvd.rank() == mover:
                    expected = slope * float(hvd.size()) ** POWERS.get(name.split()[0], 0)
                    np.testing.assert_allclose(got[i, j], expected, 1e-5, 1e-7, err_msg=name)


@pytest.mark.np(2)
def test_second_derivatives() -> None:
    for function in (
        lambda x: hvd.allreduce(x * x * x, op=hvd.Sum),
        lambda x: hvd.allgather(x * x * x),
    ):
        x = tf.constant([1.0, 2.0], tf.float64)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(function(x))
            first = inner.gradient(y, x)
        second = outer.gradient(first, x)
        assert first is not None and second is not None
        terms = hvd.size() if function(x).shape == (2,) else 1
        np.testing.assert_allclose(first, terms * 3 * x * x)
        assert np.all(second.numpy() > 0)


@pytest.mark.np(2)
def test_what_has_no_gradient() -> None:
    x = tf.constant([1.0 + hvd.rank()])
    with tf.GradientTape() as tape:
        tape.watch(x)
        whole, real = hvd.grouped_allreduce([tf.constant([1, 2]), x], op=hvd.Sum)
        y = tf.reduce_sum(real) * tf.cast(whole[0], tf.float32)
    assert tape.gradient(y, x).numpy().tolist() == [4.0]


@pytest.mark.np(2)
def test_through_loops_and_branches() -> None:
    @tf.function
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = hvd.allreduce(y * 2.0, op=hvd.Sum)
            y = hvd.allreduce(y, op=hvd.Sum) if tf.reduce_sum(x) > 0.0 else y
        return tape.gradient(y, x)

    factor = (2.0 * hvd.size()) ** 3 * hvd.size()
    assert gradient(tf.constant(1.0)).numpy() == factor
    assert gradient(tf.constant(-1.0)).numpy() == factor / hvd.size()
