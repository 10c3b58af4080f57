"""Optimizers of tf.compat.v1, in graphs and sessions, step as one process on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from laws import WIDTH, WORDS, data

v1 = tf.compat.v1
STEPS = 4
MAKE = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.3),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.05),
}


class Program:
    """A TF1 program: an embedding and a layer, a training step that is fed, a session."""

    def __init__(
        self, optimizer: Callable[[], Any], resource: bool = True, scale: float = 1.0
    ) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            random = np.random.default_rng(3)
            self.variables = [
                v1.Variable(random.normal(size=shape), use_resource=resource)
                for shape in ([WORDS, WIDTH], [WIDTH, 1], [2])
            ]
            table, output, _ = self.variables
            self.feeds = [v1.placeholder(one.dtype, [None, *one.shape[1:]]) for one in data(0)]
            words, numbers, targets = self.feeds
            inputs = tf.tanh(tf.nn.embedding_lookup(table, words) + numbers)
            loss = tf.reduce_mean(tf.square(inputs @ tf.identity(output) - targets)) * scale
            self.global_step = v1.train.get_or_create_global_step()
            self.optimizer = optimizer()
            self.step = self.optimizer.minimize(
                loss, var_list=self.variables, global_step=self.global_step
            )
            self.values = [v1.placeholder(one.dtype, one.shape) for one in self.variables]
            self.loads = [
                one.assign(value).op for one, value in zip(self.variables, self.values, strict=True)
            ]
            self.session = v1.Session()
            self.session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])

    def run(self, batch: Any) -> None:
        self.session.run(
            self.step, {feed: one.numpy() for feed, one in zip(self.feeds, batch, strict=True)}
        )

    def load(self, state: list[Any]) -> None:
        self.session.run(self.loads, dict(zip(self.values, state, strict=True)))

    def state(self) -> list[Any]:
        values: list[Any] = self.session.run(self.variables)
        return values


@contextmanager
def programs(*made: Program) -> Any:
    yield made
    for program in made:
        program.session.close()


def batches(ranks: Any, steps: Any) -> tuple[Any, ...]:
    """The batches of some ranks and steps, one after the other."""
    parts = [data(rank, step) for rank in ranks for step in steps]
    return tuple(tf.concat(part, 0) for part in zip(*parts, strict=True))


def agree(one: Program, reference: Program, tolerance: float = 1e-10) -> None:
    for own, expected in zip(one.state(), reference.state(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=tolerance)
        for other in hvd.allgather_object(own):
            np.testing.assert_array_equal(own, other)


@pytest.mark.np(2)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("options", [{}, {"groups": 1}], ids=["plain", "grouped"])
def test_training_is_that_of_one_process(name: str, options: dict[str, Any]) -> None:
    make = MAKE[name]
    with programs(Program(lambda: hvd.DistributedOptimizer(make(), **options)), Program(make)) as (
        one,
        alone,
    ):
        start = one.state()
        for step in range(STEPS):
            one.run(data(hvd.rank(), step))
            alone.run(batches(range(hvd.size()), [step]))
        agree(one, alone)
        moved = [bool((a != b).any()) for a, b in zip(start, one.state(), strict=True)]
        assert moved == [True, True, False]  # the last is not used
        assert one.optimizer.get_slot_names() == alone.optimizer.get_slot_names()
        assert len(one.optimizer.variables()) == len(alone.optimizer.variables())
        for slot in one.optimizer.get_slot_names():
            values = one.session.run(one.optimizer.get_slot(one.variables[0], slot))
            expected = alone.session.run(alone.optimizer.get_slot(alone.variables[0], slot))
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-10)


@pytest.mark.np(2)
def test_reference_variables_of_old_programs() -> None:
    with programs(
        Program(lambda: hvd.DistributedOptimizer(MAKE["sgd"]()), resource=False),
        Program(MAKE["sgd"], resource=False),
    ) as (one, alone):
        one.run(data(hvd.rank()))
        alone.run(batches(range(hvd.size()), [0]))
        agree(one, alone)


@pytest.mark.np(2)
@pytest.mark.parametrize("average", [False, True])
def test_passes_are_added_up_and_the_global_step_counts_them(average: bool) -> None:
    n = 3

    def make() -> Any:
        return hvd.DistributedOptimizer(
            MAKE["adam"](),
            backward_passes_per_step=n,
            sparse_as_dense=True,
            average_aggregated_gradients=average,
        )

    reference = Program(MAKE["adam"], scale=1.0 if average else float(n))
    with programs(Program(make), reference) as (one, alone):
        for step in range(2 * n):
            before = one.state()
            one.run(data(hvd.rank(), step))
            assert one.session.run(one.global_step) == step + 1
            if step % n != n - 1:
                for own, old in zip(one.state(), before, strict=True):
                    np.testing.assert_array_equal(own, old)
            else:
                alone.run(batches(range(hvd.size()), range(step - n + 1, step + 1)))
                agree(one, alone)
        assert one.session.run(one.optimizer._agg_helper.counter) == 0


@pytest.mark.np(2)
def test_local_variables_keep_their_gradients() -> None:
    def make() -> Any:
        optimizer = hvd.DistributedOptimizer(MAKE["sgd"](), sparse_as_dense=True)
        table = v1.global_variables()[0]
        optimizer.register_local_var(table)
        return optimizer

    # A local gradient is divided by the size of the set: as if the others' were zero.
    with programs(Program(make), Program(MAKE["sgd"]), Program(MAKE["sgd"])) as made:
        one, own, alone = made
        start = one.state()[0]
        one.run(data(hvd.rank()))
        own.run(data(hvd.rank()))
        alone.run(batches(range(hvd.size()), [0]))
        half = start + (own.state()[0] - start) / hvd.size()
        np.testing.assert_allclose(one.state()[0], half, rtol=0, atol=1e-10)
        np.testing.assert_allclose(one.state()[1], alone.state()[1], rtol=0, atol=1e-10)


def adasum(a: Any, b: Any) -> Any:
    dot, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return a * (1 - (dot / (2 * aa) if aa else 0)) + b * (1 - (dot / (2 * bb) if bb else 0))


@pytest.mark.np(2)
@pytest.mark.parametrize("n", [1, 2])
def test_adasum_combines_the_steps_that_ranks_took(n: int) -> None:
    def make() -> Any:
        return hvd.DistributedOptimizer(MAKE["sgd"](), op=hvd.Adasum, backward_passes_per_step=n)

    each = [Program(MAKE["sgd"]) for _ in range(hvd.size())]
    with programs(Program(make), *each) as (one, *alone):
        for window in range(2):
            start = one.state()
            for program in alone:
                program.load(start)
            for step in range(window * n, window * n + n):
                one.run(data(hvd.rank(), step))
                for rank, program in enumerate(alone):
                    program.run(data(rank, step))
            deltas = [
                [now - old for now, old in zip(program.state(), start, strict=True)]
                for program in alone
            ]
            for own, old, a, b in zip(one.state(), start, *deltas, strict=True):
                np.testing.assert_allclose(own, old + adasum(a, b), rtol=0, atol=1e-10)


@pytest.mark.np(2, fresh=True)  # it changes the process for good
def test_programs_that_switch_all_of_tensorflow_2_off() -> None:
    v1.disable_v2_behavior()
    # What the second of two steps leaves, in units of a rank's first one, from two ranks whose
    # gradients are 1 and 2 times x: momentum makes the second step 1.5 times the first.
    for options, expected in [
        ({}, 2.5 * 1.5),
        ({"backward_passes_per_step": 2}, 2 * 1.5),
        ({"op": hvd.Adasum}, 2.5 * 1.5),  # of parallel vectors a and 2 a it is 1.5 a
        ({"op": hvd.Adasum, "backward_passes_per_step": 2}, 2.5 * 1.5),
    ]:
        v1.reset_default_graph()
        w = v1.get_variable("w", initializer=np.ones(3) * (hvd.rank() + 1))
        x = v1.placeholder(tf.float64, [3])
        optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.125, 0.5), **options)
        step = optimizer.minimize(tf.reduce_sum(w * x), global_step=v1.train.create_global_step())
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for _ in range(2):
                session.run(step, {x: np.arange(3.0) * (hvd.rank() + 1)})
            result = session.run(w)
        np.testing.assert_allclose(result, 1 - 0.125 * expected * np.arange(3.0), rtol=1e-12)


@pytest.mark.np(2)
def test_in_eager_code_too() -> None:
    w = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(MAKE["sgd"]())
    optimizer.minimize(lambda: tf.reduce_sum(w) * (hvd.rank() + 1), var_list=[w])
    np.testing.assert_allclose(w.numpy(), [1 - 0.3 * 1.5, 2 - 0.3 * 1.5], rtol=1e-6)
    with pytest.raises(ValueError, match="graph"):
        hvd.DistributedOptimizer(MAKE["sgd"](), backward_passes_per_step=2)


@pytest.mark.np(2)
@pytest.mark.flavour("keras3", "tf_keras")
def test_optimizers_of_keras_are_handed_on_with_all_arguments() -> None:
    options = {
        "name": "mine",
        "device_dense": "/cpu:0",
        "device_sparse": "/cpu:0",
        "compression": hvd.Compression.fp16,
        "sparse_as_dense": True,
        "gradient_predivide_factor": 1.0,
        "op": hvd.Sum,
        "backward_passes_per_step": 2,
        "average_aggregated_gradients": True,
        "groups": 3,
        "process_set": hvd.global_process_set,
        "scale_local_gradients": False,
    }
    optimizer = tf.keras.optimizers.SGD(0.1)
    with mock.patch("horovod.tensorflow.keras.DistributedOptimizer") as wrapper:
        made = hvd.DistributedOptimizer(optimizer, **options)
    assert made is wrapper.return_value
    wrapper.assert_called_once_with(optimizer, **options)


@pytest.mark.np(2)
def test_anything_else_is_refused() -> None:
    for optimizer in (None, "sgd", object(), tf.Variable(1.0)):
        with pytest.raises(ValueError, match=r"tf\.compat\.v1\.train or of Keras"):
            hvd.DistributedOptimizer(optimizer)
    sgd = MAKE["sgd"]
    pair = hvd.add_process_set([0])
    for error, options in [
        (ValueError, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        (ValueError, {"op": hvd.Adasum, "average_aggregated_gradients": True}),
        (ValueError, {"groups": -1}),
        (NotImplementedError, {"op": hvd.Adasum, "process_set": pair}),
    ]:
        with pytest.raises(error):
            hvd.DistributedOptimizer(sgd(), **options)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="passes"):
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
    hvd.remove_process_set(pair)
