"""The acceptance matrix: each row trains as one process would on the joined batch, or fails.

Rows are shown to depend on reduction: each is trained once more with the allreduce replaced by the
identity, at run time, so that nothing is traced again; then it must differ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import small
from horovod.tensorflow import collectives
from small import KERAS3, ROWS, K

STEPS = 3  # of the optimizer
TOLERANCE = 1e-6  # Keras computes losses in float32


def optimizer(kind: str) -> Any:
    if kind == "sgd":
        return K.optimizers.SGD(0.1, momentum=0.9)
    if kind == "adam":
        return K.optimizers.Adam(0.05)
    inner = K.optimizers.SGD(0.1, momentum=0.9)
    return K.mixed_precision.LossScaleOptimizer(inner, dynamic_growth_steps=2)


def scaled(opt: Any, loss: Any) -> Any:
    if not isinstance(opt, K.mixed_precision.LossScaleOptimizer):
        return loss
    return opt.scale_loss(loss) if KERAS3 else opt.get_scaled_loss(loss)


def step(model: Any, opt: Any, x: Any, y: Any, *, distribute: bool, dense: bool = False) -> None:
    with tf.GradientTape() as tape:
        loss = scaled(opt, tf.reduce_mean(tf.square(model(x, training=True) - y)))
    if distribute:
        tape = hvd_tf.DistributedGradientTape(tape)
    grads = tape.gradient(loss, model.trainable_variables)
    if dense:
        grads = [tf.convert_to_tensor(grad) for grad in grads]
    if not KERAS3 and isinstance(opt, K.mixed_precision.LossScaleOptimizer):
        grads = opt.get_unscaled_gradients(grads)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))


@functools.cache
def expected(kind: str, net: str, passes: int) -> np.ndarray[Any, Any]:
    """What one process has after the same steps on the batches of all ranks and passes.

    Passes add up in dense gradients, from which Adam of Keras 3 makes other squares than from
    IndexedSlices with an index twice.
    """
    model, opt = small.model(net), optimizer(kind)
    x, y = (small.joined(values) for values in small.data(net, STEPS * passes))
    together = len(x) // STEPS
    for number in range(STEPS):
        rows = slice(number * together, (number + 1) * together)
        step(model, opt, x[rows], y[rows], distribute=False, dense=passes > 1)
    return small.weights(model)


@contextmanager
def switched_allreduce() -> Iterator[Any]:
    """Inside it allreduce is the identity while the variable that it gives is False."""
    on, real = tf.Variable(True, trainable=False), collectives.allreduce

    def switched(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tf.cond(on, lambda: real(tensor, *args, **kwargs), lambda: tensor)

    collectives.allreduce = switched
    try:
        yield on
    finally:
        collectives.allreduce = real


@pytest.mark.np(2)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("net", ["dense", "embedding"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "loss_scale"])
@pytest.mark.parametrize("way", ["fit", "tape", "train_on_batch"])
def test_row(way: str, kind: str, net: str, passes: int) -> None:
    model, opt = small.model(net), optimizer(kind)
    start = small.weights(model)
    if way != "tape" or passes > 1:  # with a tape a plain optimizer does
        opt = hvd.DistributedOptimizer(
            opt,
            backward_passes_per_step=passes,
            average_aggregated_gradients=True,
            sparse_as_dense=passes > 1,
        )
    opt.build(model.trainable_variables)
    first = [*model.get_weights()], [np.asarray(one) for one in opt.variables]
    x, y = (small.own(values) for values in small.data(net, STEPS * passes))
    model.compile(optimizer=opt, loss="mse", jit_compile=False)
    one_step = tf.function(lambda x, y: step(model, opt, x, y, distribute=True))

    def train() -> np.ndarray[Any, Any]:
        if way == "fit":
            model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
        for at in range(0, len(x), ROWS) if way != "fit" else ():
            batch = tf.constant(x[at : at + ROWS]), tf.constant(y[at : at + ROWS])
            if way == "tape":
                one_step(*batch)
            else:
                model.train_on_batch(*batch)
        return small.weights(model)

    with switched_allreduce() as on:
        reduced = train()
        on.assign(False)
        model.set_weights(first[0])
        for variable, value in zip(opt.variables, first[1], strict=True):
            variable.assign(value)
        alone = train()
    should = expected(kind, net, passes)
    assert small.different(reduced, start, 1e-3)
    small.equal(reduced, should, TOLERANCE)
    small.same_everywhere(reduced)
    assert small.different(alone, should, 100 * TOLERANCE)
