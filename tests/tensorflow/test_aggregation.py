"""C42: N passes and one step are one step on the batches of all passes and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
from horovod.tensorflow.reduction import make_allreduce_grads_fn
from laws import Model, data, descend, everywhere, gradients, near

N = 3
WINDOWS = 2
MODES = {
    "eager": lambda function: function,
    "traced": lambda function: tf.function(function, autograph=False),
}


def helper(sparse_as_dense: bool = True, average: bool = False, **options: Any) -> Any:
    reduce = make_allreduce_grads_fn(
        "test",
        "",
        "",
        hvd.Compression.none,
        sparse_as_dense,
        hvd.Average,
        1.0,
        None,
        hvd.global_process_set,
    )
    return LocalGradientAggregationHelperEager(N, reduce, sparse_as_dense, average, **options)


class Trained:
    """A model with aggregation, and the same without, in one process on all batches."""

    def __init__(self, mode: str, average: bool = False) -> None:
        self.model, self.alone = Model(), Model()
        self.helper = helper(average=average)
        self.average = average
        self.steps = tf.Variable(0)

        @MODES[mode]
        def one_pass(words: Any, numbers: Any, targets: Any) -> None:
            grads = gradients(self.model, (words, numbers, targets))
            grads = self.helper.compute_gradients(grads, self.model.variables)
            assert grads[2] is None  # of the variable that is not used

            def apply() -> None:
                descend(self.model, grads)
                self.steps.assign_add(1)

            pairs = list(zip(grads, self.model.variables, strict=True))
            self.helper.apply_gradients(apply, None, pairs)

        self.one_pass = one_pass

    def window(self, first: int) -> None:
        """N passes on all ranks, and what they come to in one process."""
        before = self.model.state()
        for step in range(first, first + N):
            for own, old in zip(self.model.state(), before, strict=True):
                np.testing.assert_array_equal(own, old)  # nothing changes within a window
            self.one_pass(*data(hvd.rank(), step))
        batches = [
            data(rank, step) for rank in range(hvd.size()) for step in range(first, first + N)
        ]
        batch = tuple(tf.concat(part, 0) for part in zip(*batches, strict=True))
        # The gradient of a mean over all batches is the mean of theirs, of which there are N each.
        descend(self.alone, gradients(self.alone, batch), 0.5 * (1 if self.average else N))

    def check(self) -> None:
        for own, reference in zip(self.model.state(), self.alone.state(), strict=True):
            near(own, reference)
            everywhere(own)


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("average", [False, True])
def test_a_window_is_one_step_on_all_its_batches(mode: str, average: bool) -> None:
    trained = Trained(mode, average)
    for window in range(WINDOWS):
        trained.window(window * N)
        assert int(trained.steps) == window + 1
        assert int(trained.helper.counter) == 0
        trained.check()


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_two_in_one_program_are_independent(mode: str) -> None:
    one, other = Trained(mode), Trained(mode)
    other.one_pass(*data(hvd.rank(), 50))  # it is a pass ahead, also of the start of its window
    one.window(0)
    assert (int(one.steps), int(other.steps)) == (1, 0)
    assert (int(one.helper.counter), int(other.helper.counter)) == (0, 1)
    one.check()
    for step in (51, 52):
        other.one_pass(*data(hvd.rank(), step))
    assert (int(one.steps), int(other.steps)) == (1, 1)


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_infinity_is_gone_with_its_window(mode: str) -> None:
    w = tf.Variable([1.0, 2.0])
    aggregation = helper()

    @MODES[mode]
    def one_pass(grad: Any) -> Any:
        return aggregation.compute_gradients([grad], [w])[0]

    values = [1.0, float("inf"), 1.0] if hvd.rank() == 1 else [1.0, 2.0, 1.0]
    results = [one_pass(tf.fill([2], value)) for value in values]
    assert np.isinf(results[-1]).all()  # on all ranks
    results = [one_pass(tf.fill([2], 1.0 + hvd.rank())) for _ in values]
    near(results[-1], tf.fill([2], 4.5))


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_local_variables_are_added_up_and_scaled(mode: str) -> None:
    local, shared = tf.Variable(1.0), tf.Variable(1.0)
    for scale in (True, False):
        aggregation = helper(scale_local_gradients=scale)
        aggregation.register_local_var(local)
        one_pass = MODES[mode](
            lambda grad, to=aggregation: to.compute_gradients([grad, grad], [local, shared])
        )
        for _ in range(N):
            grads = one_pass(tf.constant(1.0 + hvd.rank()))
        near(grads[0], tf.constant(N * (1.0 + hvd.rank()) / (2 if scale else 1)))
        near(grads[1], tf.constant(N * 1.5))


@pytest.mark.np(2)
def test_a_function_that_was_traced_before_may_meet_new_variables() -> None:
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    aggregation = helper()

    @tf.function(autograph=False)
    def one_pass(both: bool) -> Any:
        grads = [tf.constant(1.0 + hvd.rank()), tf.constant(1.0) if both else None]
        return [g for g in aggregation.compute_gradients(grads, [first, second]) if g is not None]

    assert len(one_pass(False)) == 1
    assert len(one_pass(True)) == 2
    for grad, expected in zip(one_pass(True), [4.5, 2.0], strict=True):
        near(grad, tf.constant(expected))


@pytest.mark.np(2)
def test_slices_need_to_be_made_dense() -> None:
    w = tf.Variable(tf.zeros([4, 2]))
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([hvd.rank()]), tf.constant([4, 2]))
    with pytest.raises(ValueError, match="sparse_as_dense"):
        helper(sparse_as_dense=False).compute_gradients([slices], [w])
    aggregation = helper()
    for _ in range(N):
        grads = aggregation.compute_gradients([slices], [w])
    near(grads[0], tf.constant([[1.5, 1.5], [1.5, 1.5], [0.0, 0.0], [0.0, 0.0]]))
    assert [tuple(one.shape) for one in aggregation.locally_aggregated_grads] == [(4, 2)]


@pytest.mark.np(2)
@pytest.mark.parametrize("passes", [0, -1])
def test_the_number_of_passes_is_positive(passes: int) -> None:
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        LocalGradientAggregationHelperEager(passes, lambda grads, vars: grads, True, False)
