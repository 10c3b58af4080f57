"""Gradients of several passes: one step of the mean over passes and ranks, iterations by steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow.keras as hvd
import small
from small import KERAS3, ROWS, K

SHAPES = (2, 3), (4,)
PASSES = 3
WINDOWS = 3


def optimizers() -> list[Any]:
    made = [K.optimizers.SGD(0.1, momentum=0.9), K.optimizers.Adam(0.1, global_clipnorm=0.5)]
    return made if KERAS3 else [*made, K.optimizers.legacy.Adam(0.1)]


def mean_of_window(of: list[Any], window: int, passes: int = PASSES) -> list[Any]:
    each = [small.mean_gradients(of, window * passes + at) for at in range(passes)]
    return [tf.add_n(list(ones)) / passes for ones in zip(*each, strict=True)]


def expected(opt: Any) -> np.ndarray[Any, Any]:
    of = small.variables(*SHAPES)
    for window in range(WINDOWS):
        opt.apply_gradients(list(zip(mean_of_window(of, window), of, strict=True)))
    return small.weights(of)


def apply(opt: Any, of: list[Any], compiled: bool = False) -> Any:
    """A function that applies gradients, eagerly or in one traced function."""

    def step(*grads: Any) -> None:
        opt.apply_gradients(list(zip(grads, of, strict=True)))

    return tf.function(step) if compiled else step


@pytest.mark.np(2)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_windows_equal_big_batches(compiled: bool, average: bool) -> None:
    for plain, inner in zip(optimizers(), optimizers(), strict=True):
        opt = hvd.DistributedOptimizer(
            inner, backward_passes_per_step=PASSES, average_aggregated_gradients=average
        )
        of = small.variables(*SHAPES)
        step = apply(opt, of, compiled)
        start = small.weights(of)
        for number in range(WINDOWS * PASSES):
            assert small.iterations(opt) == number // PASSES
            assert int(np.asarray(opt._agg_helper.counter)) == number % PASSES
            grads = small.gradients(of, number, hvd.rank())
            step(*(grads if average else [grad / PASSES for grad in grads]))
            if number < PASSES - 1:
                small.equal(small.weights(of), start)
        assert small.iterations(opt) == WINDOWS
        small.equal(small.weights(of), expected(plain))


@pytest.mark.np(2)
def test_fit_counts_steps() -> None:
    model = small.model()
    opt = hvd.DistributedOptimizer(
        K.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=PASSES,
        average_aggregated_gradients=True,
    )
    model.compile(optimizer=opt, loss="mse")
    x, y = (small.own(values) for values in small.data("dense", WINDOWS * PASSES))
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    assert small.iterations(opt) == WINDOWS
    one, plain = small.model(), K.optimizers.SGD(0.1, momentum=0.9)
    one.compile(optimizer=plain, loss="mse")
    x, y = (small.joined(values) for values in small.data("dense", WINDOWS * PASSES))
    together = ROWS * hvd.size() * PASSES
    one.fit(x, y, batch_size=together, epochs=1, shuffle=False, verbose=0)
    small.equal(small.weights(model), small.weights(one), 1e-6)


@pytest.mark.np(2)
def test_a_broadcast_leaves_sums_alone() -> None:
    of_keras = {"gradient_accumulation_steps": 2} if KERAS3 else {}
    ours = {} if KERAS3 else {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    model, one = small.model(), small.model()
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(0.1, momentum=0.9, **of_keras), **ours)
    model.compile(optimizer=opt, loss="mse")
    x, y = (small.own(values) for values in small.data("dense", 4))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0, callbacks=[broadcast])
    one.compile(optimizer=K.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    x, y = (small.joined(values) for values in small.data("dense", 4))
    one.fit(x, y, batch_size=2 * ROWS * hvd.size(), epochs=1, shuffle=False, verbose=0)
    small.equal(small.weights(model), small.weights(one), 1e-6)
    small.same_everywhere(small.weights(model))


@pytest.mark.np(2)
def test_optimizers_are_independent() -> None:
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    first, second = (hvd.DistributedOptimizer(K.optimizers.SGD(1.0), **options) for _ in range(2))
    these, those = small.variables(*SHAPES), small.variables(*SHAPES)
    start = small.weights(these)
    for number in range(2):
        apply(first, these)(*small.gradients(these, number, hvd.rank()))
        if number == 0:
            apply(second, those)(*small.gradients(those, number, hvd.rank()))
    small.equal(small.weights(those), start)
    assert (small.iterations(first), small.iterations(second)) == (1, 0)
    apply(second, those)(*small.gradients(those, 1, hvd.rank()))
    small.equal(small.weights(those), small.weights(these))
    assert small.different(small.weights(these), start)


@pytest.mark.np(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_an_infinity_is_gone_in_the_next_window(compiled: bool) -> None:
    opt = hvd.DistributedOptimizer(
        K.mixed_precision.LossScaleOptimizer(K.optimizers.SGD(1.0), initial_scale=1.0),
        backward_passes_per_step=PASSES,
        average_aggregated_gradients=True,
    )
    of = small.variables(*SHAPES)
    step = apply(opt, of, compiled)
    start = small.weights(of)
    for number in range(2 * PASSES):
        grads = small.gradients(of, number, hvd.rank())
        if number == 1 and hvd.rank() == 1:
            grads[0] *= np.inf
        if number >= PASSES and KERAS3:
            grads = [grad * 0.5 for grad in grads]  # the scale now
        step(*grads)
        if number < 2 * PASSES - 1:
            small.equal(small.weights(of), start)
    mean = np.concatenate([np.ravel(grad) for grad in mean_of_window(of, 1)])
    small.equal(small.weights(of), start - mean)


@pytest.mark.np(2)
def test_a_variable_without_a_gradient_has_none_in_the_window() -> None:
    opt = hvd.DistributedOptimizer(K.optimizers.SGD(1.0), backward_passes_per_step=2)
    of = small.variables(*SHAPES, (2,))
    before = small.weights(of[2:])
    for number in range(2):
        grads = [*small.gradients(of[:2], number, hvd.rank()), None]
        opt.apply_gradients(list(zip(grads, of, strict=True)))
    small.equal(small.weights(of[2:]), before)
    assert small.iterations(opt) == 1
    assert len(opt._agg_helper.locally_aggregated_grads) == 2


@pytest.mark.np(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("given", [True, False], ids=["no_gradient", "not_given"])
def test_a_variable_rests_in_a_window_without_its_gradients(compiled: bool, given: bool) -> None:
    """As a layer that was frozen: its momentum mustn't move it."""
    opt, plain = (K.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    hvd.DistributedOptimizer(opt, backward_passes_per_step=2, average_aggregated_gradients=True)
    of, reference = small.variables(*SHAPES), small.variables(*SHAPES)
    opt.build(of)
    plain.build(reference)

    def only_one(optimizer: Any, these: list[Any]) -> Any:
        def step(grad: Any) -> None:
            pairs = [(None, these[0]), (grad, these[1])] if given else [(grad, these[1])]
            optimizer.apply_gradients(pairs)

        return tf.function(step) if compiled else step

    both, one, both_plain = apply(opt, of, compiled), only_one(opt, of), apply(plain, reference)
    one_plain = only_one(plain, reference)
    for window in range(4):
        for number in (2 * window, 2 * window + 1):
            grads = small.gradients(of, number, hvd.rank())
            both(*grads) if window % 3 == 0 else one(grads[1])
        mean = mean_of_window(of, window, 2)
        both_plain(*mean) if window % 3 == 0 else one_plain(mean[1])
        small.equal(small.weights(of), small.weights(reference))
    small.same_everywhere(small.weights(of))


@pytest.mark.np(2)
def test_slices_need_to_be_allowed_to_become_dense() -> None:
    of = small.variables((4, 2))
    slices = tf.IndexedSlices(tf.ones((2, 2), tf.float64), tf.constant([1, 1]), tf.constant([4, 2]))
    for dense in (False, True):
        opt = hvd.DistributedOptimizer(
            K.optimizers.SGD(1.0), backward_passes_per_step=2, sparse_as_dense=dense
        )
        if not dense:
            with pytest.raises(ValueError, match="sparse_as_dense"):
                opt.apply_gradients([(slices, of[0])])
            continue
        before = small.weights(of)
        for _ in range(2):
            opt.apply_gradients([(slices, of[0])])
        change = np.zeros((4, 2))
        change[1] = 4.0  # two passes, each with the row twice
        small.equal(small.weights(of), before - change.ravel())


@pytest.mark.np(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_accumulation_of_keras_itself(compiled: bool) -> None:
    if not KERAS3:
        return
    steps = {"gradient_accumulation_steps": PASSES}
    for kind, options in (
        (K.optimizers.SGD, {"momentum": 0.9}),
        (K.optimizers.Adam, {"global_clipnorm": 0.5, "weight_decay": 0.01}),
    ):
        opt = hvd.DistributedOptimizer(kind(0.1, **options, **steps))
        plain = kind(0.1, **options, **steps)
        of, others = small.variables(*SHAPES), small.variables(*SHAPES)
        step = apply(opt, of, compiled)
        for number in range(WINDOWS * PASSES):
            step(*small.gradients(of, number, hvd.rank()))
            apply(plain, others)(*small.mean_gradients(others, number))
        small.same_everywhere(small.weights(of))
        small.equal(small.weights(of), small.weights(others))
        assert small.iterations(opt) == small.iterations(plain) == WINDOWS


@pytest.mark.np(2)
def test_passes_that_only_add_up_send_nothing() -> None:
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {"backward_passes_per_step": 2})]
    if KERAS3:
        ways.append(({"gradient_accumulation_steps": 2}, {}))
    for of_keras, ours in ways:
        opt = hvd.DistributedOptimizer(K.optimizers.SGD(0.1, **of_keras), **ours)
        calls: list[Any] = []
        reduce = opt._allreduce

        def counted(grads: Any, these: Any, calls: Any = calls, reduce: Any = reduce) -> Any:
            calls.append(grads)
            return reduce(grads, these)

        opt._allreduce = counted
        of = small.variables(*SHAPES)
        for number in range(4):
            apply(opt, of)(*small.gradients(of, number, hvd.rank()))
            assert len(calls) == (number + 1) // 2


@pytest.mark.np(2)
def test_graphs_of_tensorflow_1_are_refused() -> None:
    """Nothing there runs the sums, so that it would never take a step."""
    if KERAS3:
        return
    opt = hvd.DistributedOptimizer(K.optimizers.legacy.SGD(0.1), backward_passes_per_step=2)
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("w", initializer=1.0, use_resource=True)
        with pytest.raises(ValueError, match="TensorFlow 1"):
            opt.apply_gradients([(tf.constant(1.0), variable)])


@pytest.mark.np(2)
def test_two_ways_to_accumulate_are_refused() -> None:
    if not KERAS3:
        return
    inner = K.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    for opt in (inner, K.optimizers.LossScaleOptimizer(inner)):
        with pytest.raises(ValueError, match="use one"):
            hvd.DistributedOptimizer(opt, backward_passes_per_step=2)
