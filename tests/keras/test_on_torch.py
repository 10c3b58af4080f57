"""Keras 3 on PyTorch: tensors go through the same engine, and TensorFlow isn't imported."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.flavour("keras3_on_torch"), pytest.mark.np(2)]
BATCHES, ROWS = 4, 2


def keras_and_hvd() -> tuple[Any, Any]:
    import keras

    import horovod.keras as hvd

    assert keras.config.backend() == "torch"
    assert "tensorflow" not in sys.modules
    return keras, hvd


def train(opt: Any, *, own: bool, passes: int = 1, callbacks: Any = (), **options: Any) -> Any:
    """The weights after ``fit``, on this rank's rows or on those of all ranks and passes."""
    keras, hvd = keras_and_hvd()
    layers = [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    draw = np.random.default_rng(1)
    model.set_weights([draw.normal(size=one.shape) for one in model.get_weights()])
    model.compile(opt, "mse", **options)
    x = draw.normal(size=(BATCHES, hvd.size(), ROWS, 3)).astype("float32")
    y = draw.normal(size=(BATCHES, hvd.size(), ROWS, 1)).astype("float32")
    x, y = (values[:, hvd.rank()] if own else values for values in (x, y))
    rows = ROWS if own else ROWS * hvd.size() * passes
    model.fit(
        x.reshape(-1, 3),
        y.reshape(-1, 1),
        batch_size=rows,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return np.concatenate([one.ravel() for one in model.get_weights()])


def check(plain: Any, wrapped: Any, passes: int = 1, **options: Any) -> None:
    _, hvd = keras_and_hvd()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    found = train(wrapped, own=True, callbacks=callbacks, **options)
    rows = hvd.allgather(found[None]).numpy()
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_allclose(found, train(plain, own=False, passes=passes), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Ftrl"])
def test_fit(kind: str) -> None:
    keras, hvd = keras_and_hvd()
    make = getattr(keras.optimizers, kind)
    check(
        make(0.05, global_clipnorm=1.0), hvd.DistributedOptimizer(make(0.05, global_clipnorm=1.0))
    )
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    wrapped = hvd.DistributedOptimizer(make(0.05), **options)
    check(make(0.05), wrapped, passes=2)
    assert int(wrapped.iterations) == BATCHES
    twice = {"gradient_accumulation_steps": 2}
    check(make(0.05), hvd.DistributedOptimizer(make(0.05, **twice)), passes=2)


@pytest.mark.parametrize("inside", [True, False])
def test_loss_scaling(inside: bool) -> None:
    keras, hvd = keras_and_hvd()
    scaling = keras.optimizers.LossScaleOptimizer
    sgd = keras.optimizers.SGD(0.05)
    both = (
        hvd.DistributedOptimizer(scaling(sgd)) if inside else scaling(hvd.DistributedOptimizer(sgd))
    )
    check(scaling(keras.optimizers.SGD(0.05)), both)
    import torch

    of = keras.Variable(np.ones(3))
    opt = hvd.DistributedOptimizer(scaling(keras.optimizers.SGD(1.0), initial_scale=4.0))
    for step in range(2):
        bad = step == 0 and hvd.rank() == 1
        opt.apply([torch.full((3,), np.inf if bad else 2.0)], [of])
    assert float(opt.dynamic_scale) == 2.0
    np.testing.assert_allclose(of.numpy(), 0.0)


def test_stateless_apply_reduces() -> None:
    keras, hvd = keras_and_hvd()
    import torch

    for wrap in (lambda opt: opt, lambda opt: keras.optimizers.LossScaleOptimizer(opt, 1.0)):
        of = keras.Variable(np.ones(3))
        opt = hvd.DistributedOptimizer(wrap(keras.optimizers.SGD(1.0)))
        opt.build([of])
        state = [one.value.detach().clone() for one in opt.variables]
        grad = torch.full((3,), float(hvd.rank()))
        (new,), _ = opt.stateless_apply(state, [grad], [of.value.detach().clone()])
        np.testing.assert_allclose(new.detach().numpy(), 0.5)


def test_options() -> None:
    keras, hvd = keras_and_hvd()
    import torch

    first, second = keras.Variable(np.ones(2)), keras.Variable(np.ones(3))
    for options, factor in (
        ({"op": hvd.Sum}, 2.0),
        ({"groups": 2}, 1.0),
        ({"groups": [[second]]}, 1.0),
        ({"compression": hvd.Compression.fp16}, 1.0),
        ({"compression": hvd.Compression.error_feedback(hvd.Compression.fp16)}, 1.0),
        ({"gradient_predivide_factor": 2.0}, 1.0),
    ):
        opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        for one in (first, second):
            one.assign(np.zeros(one.shape))
        grads = [torch.full(one.shape, float(hvd.rank())) for one in (first, second)]
        opt.apply_gradients(zip(grads, (first, second), strict=True))
        for one in (first, second):
            np.testing.assert_allclose(one.numpy(), -0.5 * factor)
    assert float(hvd.allreduce(float(hvd.rank()))) == 0.5
    assert hvd.broadcast([hvd.rank()], 1).tolist() == [1]
    assert hvd.allgather([hvd.rank()]).tolist() == [0, 1]
    assert hvd.reducescatter(np.ones(2), op=hvd.Sum).tolist() == [2.0]
    with pytest.raises(RuntimeError, match="TensorFlow 1"):
        hvd.broadcast_global_variables(0)
