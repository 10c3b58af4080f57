"""No way to train with Keras leaves ranks alone: each is right, or refused with a reason."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import small
from small import KERAS3, ROWS, K

BATCHES = 4
TOLERANCE = 1e-6


def loss_of(model: Any, x: Any, y: Any) -> Any:
    """The loss in float64, of what ``fit`` may have made float32."""
    return tf.reduce_mean(tf.square(model(x, training=True) - tf.cast(y, tf.float64)))


def plain_step(model: Any, data: Any) -> Any:
    x, y = data[:2]
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    of = model.trainable_variables
    return loss, tape.gradient(loss, of), of


class ByApplyGradients(K.Sequential):
    def train_step(self, data: Any) -> Any:
        loss, grads, of = plain_step(self, data)
        self.optimizer.apply_gradients(zip(grads, of, strict=True))
        return {"loss": loss}


class ByApply(K.Sequential):
    def train_step(self, data: Any) -> Any:
        loss, grads, of = plain_step(self, data)
        self.optimizer.apply(grads, of)
        return {"loss": loss}


class ByTape(K.Sequential):
    """The gradients are reduced already, and then changed."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with hvd_tf.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(self, x, y)
        grads = tape.gradient(loss, self.trainable_variables)
        grads = [grad * 1.0 for grad in grads]
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def expected() -> np.ndarray[Any, Any]:
    model, opt = small.model(), K.optimizers.SGD(0.1, momentum=0.9)
    x, y = (small.joined(values) for values in small.data("dense", BATCHES))
    together = ROWS * hvd.size()
    for at in range(0, len(x), together):
        batch = slice(at, at + together)
        _, grads, of = plain_step(model, (x[batch], y[batch]))
        opt.apply_gradients(zip(grads, of, strict=True))
    return small.weights(model)


def check(model: Any) -> None:
    small.same_everywhere(small.weights(model))
    small.equal(small.weights(model), expected(), TOLERANCE)


def distributed(**options: Any) -> Any:
    return hvd.DistributedOptimizer(K.optimizers.SGD(0.1, momentum=0.9), **options)


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "jit_compile": (None, {"jit_compile": True}),
    "steps_per_execution": (None, {"steps_per_execution": 2}),
    "run_eagerly": (None, {"run_eagerly": True}),
    "apply_gradients": (ByApplyGradients, {}),
    "apply_gradients_eagerly": (ByApplyGradients, {"run_eagerly": True}),
    "tape": (ByTape, {}),
    **({"apply": (ByApply, {})} if KERAS3 else {}),
}


@pytest.mark.np(2)
@pytest.mark.parametrize("way", ["jit_compile", "steps_per_execution", "run_eagerly", "tape"])
def test_fit(way: str) -> None:
    fit(way)


@pytest.mark.np(2)
@pytest.mark.parametrize("way", ["apply_gradients", "apply_gradients_eagerly", "apply"])
def test_an_overridden_train_step(way: str) -> None:
    if way in WAYS:  # tf-keras has no apply
        fit(way)


def fit(way: str) -> None:
    base, options = WAYS[way]
    model = small.model(base=base)
    model.compile(optimizer=distributed(), loss="mse", **options)
    x, y = (small.own(values) for values in small.data("dense", BATCHES))
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    check(model)


@pytest.mark.np(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("how", ["apply_gradients", "apply"])
def test_a_loop_with_a_plain_tape(compiled: bool, how: str) -> None:
    opt, model = distributed(), small.model()
    if how == "apply" and not KERAS3:
        return
    opt.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        _, grads, of = plain_step(model, (x, y))
        if how == "apply":
            opt.apply(grads)  # in the order it was built with
        else:
            opt.apply_gradients(zip(grads, of, strict=True))

    one_step = tf.function(step) if compiled else step
    x, y = (small.own(values) for values in small.data("dense", BATCHES))
    for at in range(0, len(x), ROWS):
        one_step(tf.constant(x[at : at + ROWS]), tf.constant(y[at : at + ROWS]))
    check(model)


@pytest.mark.np(2)
def test_a_model_compiled_before_its_optimizer_was_wrapped() -> None:
    model, opt = small.model(), K.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer=opt, loss="mse")
    hvd.DistributedOptimizer(opt)
    x, y = (small.own(values) for values in small.data("dense", BATCHES))
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    check(model)


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("way", "around"), [("fit", None), ("train_on_batch", "wrapped"), ("fit", "inside")]
)
def test_a_model_that_has_trained_before_its_optimizer_was_wrapped(way: str, around: Any) -> None:
    """What TensorFlow has compiled for it knew nothing of that."""
    model, opt = small.model(), K.optimizers.SGD(0.1, momentum=0.9)
    outer = opt if around is None else K.mixed_precision.LossScaleOptimizer(opt, initial_scale=1.0)
    model.compile(optimizer=outer, loss="mse")
    x, y = (small.own(values) for values in small.data("dense", BATCHES))
    start = model.get_weights()
    outer.learning_rate = 0.0  # nor has it a momentum then
    train(way, model, x, y)
    model.set_weights(start)
    outer.learning_rate = 0.1
    hvd.DistributedOptimizer(opt if around == "inside" else outer)
    train(way, model, x, y)
    check(model)


def train(way: str, model: Any, x: Any, y: Any) -> None:
    if way == "fit":
        model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
        return
    for at in range(0, len(x), ROWS):
        model.train_on_batch(x[at : at + ROWS], y[at : at + ROWS])


@pytest.mark.np(2)
def test_a_clone_compiled_with_a_rebuilt_optimizer() -> None:
    opt, first = distributed(), small.model()
    model = K.models.clone_model(first)
    model.set_weights(first.get_weights())
    model.compile(optimizer=opt.from_config(opt.get_config()), loss="mse")
    x, y = (small.own(values) for values in small.data("dense", BATCHES))
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    check(model)


@pytest.mark.np(2)
def test_stateless_apply_is_refused_on_this_backend() -> None:
    if not KERAS3:
        return
    of = small.variables((3,))
    opt = distributed()
    opt.build(of)
    values = [tf.constant(np.asarray(one)) for one in of]
    state = [tf.constant(np.asarray(one)) for one in opt.variables]
    with pytest.raises(ValueError, match="stateless_apply"):
        opt.stateless_apply(state, small.gradients(of, 0, hvd.rank()), values)


@pytest.mark.np(2)
def test_an_optimizer_with_two_numbers_of_gradients_is_refused() -> None:
    if not KERAS3:
        return
    with pytest.raises(ValueError, match="1 gradients for 2 variables"):
        distributed().apply([tf.constant(1.0)], small.variables((), ()))


@pytest.mark.np(2)
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_gradients_of_a_distributed_tape_are_not_reduced_again(op: Any, compiled: bool) -> None:
    of = small.variables((3,))
    variable = small.keras_backing(of[0])
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0), op=op)
    opt.build(of)
    factor = tf.constant(float(hvd.rank() + 1), tf.float64)
    before = small.weights(of)

    def step() -> None:
        with hvd_tf.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
            loss = tf.reduce_sum(variable) * factor
        opt.apply_gradients(list(zip(tape.gradient(loss, [variable]), of, strict=True)))

    (tf.function(step) if compiled else step)()
    total = sum(range(1, hvd.size() + 1))
    small.equal(before - small.weights(of), total / (1 if op == hvd.Sum else hvd.size()))


@pytest.mark.np(2)
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_gradients_that_were_changed_after_compute_gradients(op: Any) -> None:
    of = small.variables((3,))
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0), op=op)
    opt.build(of)
    factor = float(hvd.rank() + 1)
    before = small.weights(of)
    pairs = opt.compute_gradients(lambda: factor * tf.reduce_sum(small.keras_backing(of[0])), of)
    halves = [(grad / 2, variable) for grad, variable in pairs]
    if op == hvd.Sum:
        with pytest.raises(ValueError, match="again"):
            opt.apply_gradients(halves)
        opt.apply_gradients(pairs)  # as they are, they are fine
        small.equal(before - small.weights(of), 3.0)
    else:
        opt.apply_gradients(halves)
        small.equal(before - small.weights(of), 0.75)


@pytest.mark.np(2)
def test_optimizers_with_names_in_functions_of_one_name() -> None:
    """Ranks take the two in different orders."""
    made = []
    for name in ("first", "second"):
        opt, of = distributed(name=name), small.variables((3,))
        opt.build(of)
        made.append((opt, of))

    def steps(place: int) -> Any:
        opt, of = made[place]
        late = place == hvd.rank()

        @tf.function
        def step(grad: Any) -> None:
            if late:
                (grad,) = tf.numpy_function(
                    lambda one: (time.sleep(0.2), one)[1:], [grad], [grad.dtype]
                )
                grad.set_shape((3,))
            opt.apply_gradients([(grad, of[0])])

        return step

    first, second = steps(0), steps(1)

    @tf.function
    def both(grad: Any) -> None:
        first(grad)
        second(2 * grad)

    both(small.gradients(made[0][1], 0, hvd.rank())[0])
    mean = np.asarray(small.mean_gradients(made[0][1], 0)[0])
    for place, (_, of) in enumerate(made):
        start = small.weights(small.variables((3,)))
        small.equal(start - small.weights(of), 0.1 * (place + 1) * mean, TOLERANCE)


STRATEGIES = """
import keras, tf_keras
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import horovod.tensorflow.keras as hvd
hvd.init()
strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
for K in (keras, tf_keras):
    early = hvd.DistributedOptimizer(K.optimizers.SGD(1.0))
    variable = keras.Variable(1.0) if K is keras else tf.Variable(1.0)
    early.build([variable])
    with strategy.scope():
        for act in (
            lambda: hvd.DistributedOptimizer(K.optimizers.SGD(1.0)),
            lambda: strategy.run(lambda: early.apply_gradients([(tf.constant(1.0), variable)])),
        ):
            try:
                act()
            except ValueError as error:
                assert "2 replicas" in str(error), error
            else:
                raise SystemExit(f"{K.__name__}: not refused")
    early.apply_gradients([(tf.constant(1.0), variable)])
    assert float(variable.numpy()) == 0.0

one = tf.distribute.MirroredStrategy(["cpu:0"])
for how, refused in (({}, False), ({"op": hvd.Sum}, True), ({"backward_passes_per_step": 2}, True)):
    with one.scope():
        variable = keras.Variable(1.0)
        inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **how)
        scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
        scaled.build([variable])
        try:
            one.run(lambda: scaled.apply_gradients([(tf.constant(1.0), variable)]))
        except ValueError as error:
            assert refused and "strategy" in str(error), error
        else:
            assert not refused, how
"""


@pytest.mark.timeout(120)
def test_strategies_with_several_replicas_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "strategies.py"
    script.write_text(STRATEGIES)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.np(2)
def test_a_backend_without_a_front_end_is_refused() -> None:
    if not KERAS3:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(K.config, "backend", lambda: "jax")
        patch.setattr(sys.modules["keras"].config, "backend", lambda: "jax")
        with pytest.raises(NotImplementedError, match="jax"):
            distributed()
