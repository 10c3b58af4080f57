"""Every optimizer class, wrapped, steps as the plain one does with the mean gradients."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow.keras as hvd
import small
from small import KERAS3, K

STEPS = 3
SHAPES = (2, 3), (4,), (5, 2)


def classes() -> dict[str, Any]:
    """Every optimizer that this Keras has, by name."""
    base = K.optimizers.Optimizer
    found = {
        name: kind
        for name, kind in vars(K.optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base
    }
    if not KERAS3:
        legacy, base = K.optimizers.legacy, K.optimizers.legacy.Optimizer
        found |= {
            f"legacy.{name}": kind
            for name, kind in vars(legacy).items()
            if inspect.isclass(kind) and issubclass(kind, base) and kind is not base
        }
    return found


def make(kind: Any, **options: Any) -> Any:
    name = kind.__name__
    if "LossScaleOptimizer" in name:
        return kind(K.optimizers.SGD(0.1, **options), initial_scale=8.0)
    if name == "MultiOptimizer":
        rest = K.optimizers.OptimizerMap(K.optimizers.SGD(0.1, **options))
        rest["v1"] = K.optimizers.Adam(0.1, **options)
        return kind(rest)
    return kind(learning_rate=0.1, **options)


Grads = Callable[[list[Any], int], list[Any]]


def train(opt: Any, grads_of: Grads, dtype: str = "float64") -> np.ndarray[Any, Any]:
    of = small.variables(*SHAPES, dtype=dtype)
    for step in range(STEPS):
        opt.apply_gradients(list(zip(grads_of(of, step), of, strict=True)))
    return small.weights(of)


def own(of: list[Any], step: int) -> list[Any]:
    return small.gradients(of, step, hvd.rank())


def check(plain: Any, wrapped: Any, dtype: str = "float64") -> None:
    wrapped = hvd.DistributedOptimizer(wrapped)
    expected, found = train(plain, small.mean_gradients, dtype), train(wrapped, own, dtype)
    small.same_everywhere(found)
    small.equal(found, expected, 1e-9 if dtype == "float64" else 1e-5)
    assert small.different(found, small.weights(small.variables(*SHAPES)), 1e-4)


@pytest.mark.np(2)
def test_every_class() -> None:
    found = classes()
    assert len(found) > 10
    for name, kind in found.items():
        try:
            check(make(kind), make(kind), "float32")  # Muon works with no other
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.np(2)
def test_a_multi_optimizer_of_distributed_ones() -> None:
    if not KERAS3:
        return

    def multi(wrap: Callable[[Any], Any]) -> Any:
        each = K.optimizers.OptimizerMap(wrap(K.optimizers.SGD(0.1)))
        each["v1"] = wrap(K.optimizers.Adam(0.1))
        return K.optimizers.MultiOptimizer(each)

    def summed(opt: Any) -> Any:
        return hvd.DistributedOptimizer(opt, op=hvd.Sum)

    def total(of: list[Any], step: int) -> list[Any]:
        return [grad * hvd.size() for grad in small.mean_gradients(of, step)]

    expected = train(multi(lambda opt: opt), total)
    small.equal(train(multi(summed), own), expected)
    small.equal(train(summed(multi(summed)), own), expected)  # the outermost one reduces


OPTIONS: list[dict[str, Any]] = [
    {"clipnorm": 0.5},
    {"global_clipnorm": 0.5},
    {"clipvalue": 0.1},
    {"weight_decay": 0.01},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
]


@pytest.mark.np(2)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_options_see_reduced_gradients(options: dict[str, Any]) -> None:
    for kind in (K.optimizers.SGD, K.optimizers.Adam):
        check(kind(0.1, **options), kind(0.1, **options))
    check(
        make(K.mixed_precision.LossScaleOptimizer, **options),
        make(K.mixed_precision.LossScaleOptimizer, **options),
    )


class Halving(K.optimizers.schedules.LearningRateSchedule):
    """A schedule that can't be built from a config."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, step: Any) -> Any:
        return self.function(tf.cast(step, tf.float32))


@pytest.mark.np(2)
def test_schedules_are_kept_as_they_are() -> None:
    for schedule in (
        K.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
        Halving(lambda step: 0.1 / (step + 1)),
    ):
        for kind in (K.optimizers.SGD, K.optimizers.Adam):
            opt = kind(schedule)
            check(kind(schedule), opt)
            assert small.iterations(opt) == STEPS


class Ours(K.optimizers.SGD):
    """An optimizer class of a user."""


class Direct(K.optimizers.SGD):
    """One that does without what Keras has for it."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> None:
        for grad, variable in grads_and_vars:
            variable.assign(variable - 0.1 * tf.convert_to_tensor(grad))


@pytest.mark.np(2)
def test_a_class_with_a_way_of_its_own() -> None:
    check(Direct(0.1), Direct(0.1))
    check(Ours(0.1), Ours(0.1))


@pytest.mark.np(2)
def test_the_object_that_was_given_is_wrapped_and_prints_so() -> None:
    for make_one in (lambda: K.optimizers.Adam(0.25, beta_1=0.8), lambda: Ours(0.25)):
        opt = make_one()
        kind, config, name = type(opt), opt.get_config(), opt.name
        wrapped = hvd.DistributedOptimizer(opt)
        assert wrapped is opt
        assert isinstance(wrapped, kind)
        assert type(wrapped).__name__ == kind.__name__
        assert "horovod._keras" in str(type(wrapped))
        assert wrapped.get_config() == config
        assert wrapped.name == name
        wrapped.learning_rate = 0.5
        assert float(np.asarray(wrapped.learning_rate)) == 0.5 == float(np.asarray(wrapped.lr))
        wrapped.lr = 0.125
        assert float(np.asarray(wrapped.learning_rate)) == 0.125


@pytest.mark.np(2)
def test_a_wrapped_one_is_not_wrapped_again() -> None:
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(opt)


@pytest.mark.np(2)
def test_copies_and_rebuilt_ones_are_wrapped() -> None:
    original = hvd.DistributedOptimizer(K.optimizers.SGD(0.1, momentum=0.5), op=hvd.Sum)
    config = original.get_config()
    made = {
        "of the class": type(original).from_config(dict(config)),
        "of the object": original.from_config(dict(config)),
        "of __class__": original.__class__.from_config(dict(config)),
        "copy": copy.copy(original),
        "get": K.optimizers.get(original),
    }
    if KERAS3:  # tf-keras can do neither
        made["deep copy"] = copy.deepcopy(original)
        made["pickle"] = pickle.loads(pickle.dumps(original))

    def summed(of: list[Any], step: int) -> list[Any]:
        return [grad * hvd.size() for grad in small.mean_gradients(of, step)]

    two = {"backward_passes_per_step": 2}
    first = hvd.DistributedOptimizer(K.optimizers.SGD(0.1), **two)
    of = small.variables((2,))
    first.apply_gradients(list(zip(own(of, 0), of, strict=True)))
    counters = [int(np.asarray(opt._agg_helper.counter)) for opt in (first, copy.copy(first))]
    assert counters == [1, 0]

    for name, opt in made.items():
        if name == "get":
            continue
        expected = train(K.optimizers.SGD(0.1, momentum=0.5), summed)
        small.equal(train(opt, own), expected)
    assert made["get"] is original


@pytest.mark.np(2)
def test_arguments() -> None:
    def wrap(**options: Any) -> Any:
        return hvd.DistributedOptimizer(K.optimizers.SGD(1.0), **options)

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"op": hvd.Adasum}, "Average or Sum"),
        ({"op": hvd.Max}, "Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "Average"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": 0}, "groups"),
        ({"groups": "all"}, "groups"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            wrap(**options)
    with pytest.raises(ValueError, match="no optimizer"):
        hvd.DistributedOptimizer(object())
    with pytest.warns(DeprecationWarning, match="groups"):
        wrap(num_groups=2)


@pytest.mark.np(2)
@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"compression": hvd.Compression.fp16},
        {"name": "mine"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_how_gradients_are_reduced(options: dict[str, Any]) -> None:
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0), **options)
    of = small.variables(*SHAPES)
    before = small.weights(of)
    grads = small.mean_gradients(of, 0)
    opt.apply_gradients(list(zip(own(of, 0), of, strict=True)))
    factor = hvd.size() if options.get("op") == hvd.Sum else 1
    exact = 1e-3 if "compression" in options else 1e-12
    expected = before - factor * np.concatenate([np.ravel(grad) for grad in grads])
    small.equal(small.weights(of), expected, exact)
    assert options.get("name", opt.name) == opt.name


@pytest.mark.np(2)
def test_groups_of_variables_of_equal_names() -> None:
    of = small.variables((2,), (3,), (4,))
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0), groups=[of[2:], of[:1]])
    before = small.weights(of)
    expected = before - np.concatenate([np.ravel(g) for g in small.mean_gradients(of, 0)])
    opt.apply_gradients(list(zip(own(of, 0), of, strict=True)))
    small.equal(small.weights(of), expected)


@pytest.mark.np(2)
def test_sets_of_ranks() -> None:
    alone = hvd.add_process_set([0])
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0), process_set=alone)
    of = small.variables((3,))
    before = small.weights(of)
    opt.apply_gradients(list(zip(own(of, 0), of, strict=True)))
    small.equal(small.weights(of), before - np.asarray(own(of, 0)[0]))
    assert opt.process_set is alone
    assert hvd.remove_process_set(alone)


@pytest.mark.np(2)
@pytest.mark.parametrize("scale", [True, False])
def test_local_layers_stay_local(scale: bool) -> None:
    model = small.model()
    opt = hvd.PartialDistributedOptimizer(
        K.optimizers.SGD(1.0), local_layers=model.layers[-1], scale_local_gradients=scale
    )
    of = model.trainable_variables
    before = [np.asarray(one) for one in of]
    opt.apply_gradients(list(zip(own(of, 0), of, strict=True)))
    local, mean = own(of, 0), small.mean_gradients(of, 0)
    for place, start in enumerate(before):
        factor = 1 / hvd.size() if scale else 1
        grad = mean[place] if place < len(of) - 2 else local[place] * factor
        small.equal(np.asarray(of[place]), start - np.asarray(grad))
    assert len(opt._local_vars) == 2


@pytest.mark.np(2)
def test_local_layers_must_be_layers_that_have_weights() -> None:
    for layers, words in (("dense", "layers"), ([K.layers.Dense(2)], "built")):
        with pytest.raises(ValueError, match=words):
            hvd.PartialDistributedOptimizer(K.optimizers.SGD(1.0), local_layers=layers)
    hvd.PartialDistributedOptimizer(K.optimizers.SGD(1.0))


@pytest.mark.np(2)
def test_what_scripts_for_keras_2_call() -> None:
    of = small.variables((3,), (2,))
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(0.5))
    opt.build(of)
    factor = float(hvd.rank() + 1)
    mean = (1 + hvd.size()) / 2

    def loss() -> Any:
        return factor * tf.add_n([tf.reduce_sum(tf.convert_to_tensor(one)) for one in of])

    pairs = opt.compute_gradients(loss, of)
    assert [variable for _, variable in pairs] == of or KERAS3
    for grad, _ in pairs:
        small.equal(np.asarray(grad), mean)
    before = small.weights(of)
    opt.apply_gradients(pairs)
    small.equal(small.weights(of), before - 0.5 * mean)
    opt.minimize(loss, of)
    small.equal(small.weights(of), before - mean)
    with tf.GradientTape() as tape:
        value = loss()
    small.equal(np.asarray(opt._compute_gradients(value, of, tape=tape)[0][0]), mean)

    assert list(opt.variables()) == list(opt.variables) or KERAS3
    assert len(opt.variables()) == len(opt.variables) == len(opt.get_weights())
    opt.set_weights(opt.get_weights())
    assert opt._HAS_AGGREGATE_GRAD
    assert list(opt._aggregate_gradients(pairs)) == pairs or not KERAS3
    assert opt._agg_helper is None
    assert opt._local_vars == []
    reduced = opt._allreduce_grads([tf.constant(factor)], of[:1], use_generic_names=True)
    small.equal(np.asarray(reduced[0]), mean)

    @tf.function
    def graph(x: Any) -> Any:
        variable = small.keras_backing(of[0])
        return opt.get_gradients(tf.reduce_sum(variable * x), of[:1])[0]

    small.equal(np.asarray(graph(tf.constant(factor, tf.float64))), mean)


@pytest.mark.np(2)
def test_allreduce_may_be_replaced_on_an_object() -> None:
    of = small.variables((3,))
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0))
    opt._allreduce = lambda grads, variables: [grad * 0 for grad in grads]
    before = small.weights(of)
    opt.apply_gradients(list(zip(own(of, 0), of, strict=True)))
    small.equal(small.weights(of), before)
