"""Loss scaling: all ranks skip the same steps and have one scale, whatever goes around what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow.keras as hvd
import small
from small import KERAS3, ROWS, K

STEPS = 3
BAD = 1, 1  # the step and rank whose batch has an infinity


def scaling(opt: Any) -> Any:
    return K.mixed_precision.LossScaleOptimizer(opt, initial_scale=16.0, dynamic_growth_steps=2)


def outside() -> Any:
    return scaling(hvd.DistributedOptimizer(K.optimizers.SGD(0.1, momentum=0.9)))


def inside() -> Any:
    return hvd.DistributedOptimizer(scaling(K.optimizers.SGD(0.1, momentum=0.9)))


def earlier() -> Any:
    opt = K.optimizers.SGD(0.1, momentum=0.9)
    around = scaling(opt)
    hvd.DistributedOptimizer(opt)
    return around


def legacy() -> Any:
    return scaling(hvd.DistributedOptimizer(K.optimizers.legacy.SGD(0.1, momentum=0.9)))


def batches() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = small.data("dense", STEPS)
    x[BAD] = np.inf
    return x, y


def scale(opt: Any) -> float:
    return float(np.asarray(opt.dynamic_scale if KERAS3 else opt.loss_scale))


def step(model: Any, opt: Any, x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        loss = opt.scale_loss(loss) if KERAS3 else opt.get_scaled_loss(loss)
    of = model.trainable_variables
    grads = tape.gradient(loss, of)
    if not KERAS3:
        grads = opt.get_unscaled_gradients(grads)
    opt.apply_gradients(zip(grads, of, strict=True))


@pytest.mark.np(2)
@pytest.mark.parametrize("order", ["inside", "outside", "earlier", "legacy"])
@pytest.mark.parametrize("way", ["fit", "eager", "function"])
def test_an_infinity_on_one_rank(order: str, way: str) -> None:
    if order == "legacy" and KERAS3:
        return
    opt, model = globals()[order](), small.model()
    assert isinstance(opt, K.mixed_precision.LossScaleOptimizer)
    x, y = (small.own(values) for values in batches())
    if way == "fit":
        model.compile(optimizer=opt, loss="mse")
        model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    else:
        one_step = tf.function(step) if way == "function" else step
        for at in range(0, len(x), ROWS):
            one_step(model, opt, tf.constant(x[at : at + ROWS]), tf.constant(y[at : at + ROWS]))

    assert "horovod._keras" in str(type(opt))
    plain, plain_model = scaling(K.optimizers.SGD(0.1, momentum=0.9)), small.model()
    x, y = (small.joined(values) for values in batches())
    together = ROWS * hvd.size()
    for at in range(0, len(x), together):
        step(plain_model, plain, x[at : at + together], y[at : at + together])
    found = small.weights(model)
    assert np.isfinite(found).all()
    small.same_everywhere(np.append(found, scale(opt)))
    small.equal(found, small.weights(plain_model), 1e-6)
    assert scale(opt) == scale(plain) != 16.0
    assert small.iterations(opt) == small.iterations(plain)


@pytest.mark.np(2)
def test_the_one_that_compile_puts_around() -> None:
    """Keras does so with a model of float16."""
    K.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = K.Sequential([K.Input((3,)), K.layers.Dense(1)])
        model.compile(optimizer=hvd.DistributedOptimizer(K.optimizers.SGD(0.01)), loss="mse")
    finally:
        K.mixed_precision.set_global_policy("float32")
    model.set_weights([np.ones((3, 1)), np.zeros(1)])
    assert isinstance(model.optimizer, K.mixed_precision.LossScaleOptimizer)
    x, y = (small.own(values).astype("float32") for values in batches())
    before = small.weights(model)
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    found = small.weights(model)
    assert np.isfinite(found).all()
    assert small.different(found, before)
    small.same_everywhere(np.append(found, scale(model.optimizer)))


@pytest.mark.np(2)
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_the_optimizer_inside_reduces_when_it_is_used_alone(order: str) -> None:
    if order == "inside":
        opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0))
        scaling(opt)
    else:
        opt = outside().inner_optimizer
        opt.learning_rate = 1.0
        opt.momentum = 0.0
    of = small.variables((3,))
    before = small.weights(of)
    opt.apply_gradients(list(zip(small.gradients(of, 0, hvd.rank()), of, strict=True)))
    mean = small.mean_gradients(of, 0)
    small.equal(small.weights(of), before - np.asarray(mean[0]))


@pytest.mark.np(2)
def test_what_is_local_to_the_optimizer_inside_is_local() -> None:
    inner = hvd.DistributedOptimizer(K.optimizers.SGD(1.0), scale_local_gradients=False)
    opt, of = scaling(inner), small.variables((3,), (2,))
    inner.register_local_var(of[0])
    before, grads = small.weights(of), small.gradients(of, 0, hvd.rank())
    if KERAS3:
        opt.build(of)
        opt.dynamic_scale.assign(1.0)
    opt.apply_gradients(list(zip(grads, of, strict=True)))
    expected = [grads[0], small.mean_gradients(of, 0)[1]]
    small.equal(before - small.weights(of), small.weights(expected), 1e-6)
