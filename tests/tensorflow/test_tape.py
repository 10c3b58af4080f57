"""Gradients of a distributed tape are those of one process on the joined batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from laws import ROWS, Model, data, descend, everywhere, gradients, joined, near

STEPS = 4


def local_tape(model: Model, batch: Any, **options: Any) -> tuple[Any, Any]:
    with tf.GradientTape(**options) as tape:
        loss = model.loss(*batch)
    return tape, loss


MODES = {
    "eager": lambda function: function,
    "traced": lambda function: tf.function(function, autograph=False),
}


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sparse_as_dense": True},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"groups": 1, "sparse_as_dense": True},
    ],
    ids=str,
)
def test_training_is_that_of_one_process(mode: str, options: dict[str, Any]) -> None:
    model, alone = Model(), Model()

    @MODES[mode]
    def gradients_of(words: Any, numbers: Any, targets: Any) -> Any:
        tape, loss = local_tape(model, (words, numbers, targets))
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, model.variables)

    start = model.state()
    for step in range(STEPS):
        descend(model, gradients_of(*data(hvd.rank(), step)))
        descend(alone, gradients(alone, joined(step)))
    for own, reference, old in zip(model.state(), alone.state(), start, strict=True):
        near(own, reference)
        everywhere(own)
        assert (own == old).all() == (reference == old).all()  # only what is unused hasn't moved


@pytest.mark.np(2)
def test_sum_is_the_sum_of_the_gradients() -> None:
    model = Model()
    tape, loss = local_tape(model, data(hvd.rank()))
    grads = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, model.variables)
    for grad, mean in zip(grads, gradients(model, joined()), strict=True):
        near(grad, None if mean is None else tf.convert_to_tensor(mean) * hvd.size())


@pytest.mark.np(2)
def test_slices_stay_slices_and_keep_their_shape() -> None:
    model = Model()
    tape, loss = local_tape(model, data(hvd.rank()))
    grad = hvd.DistributedGradientTape(tape).gradient(loss, model.table)
    assert isinstance(grad, tf.IndexedSlices)
    assert grad.values.shape[0] == grad.indices.shape[0] == ROWS * hvd.size()
    assert tuple(np.asarray(grad.dense_shape)) == tuple(model.table.shape)


@pytest.mark.np(2)
def test_gradients_have_the_structure_of_the_sources() -> None:
    model = Model()
    reference = gradients(model, joined())
    table, hidden, unused, output = model.variables
    for make in (
        lambda t, h, u, o: h,
        lambda t, h, u, o: [t, h, u, o],
        lambda t, h, u, o: (h, [o, (u,)]),
        lambda t, h, u, o: {"z": h, "a": {"b": [t, o]}},
    ):
        tape, loss = local_tape(model, data(hvd.rank()))
        sources = make(table, hidden, unused, output)
        grads = hvd.DistributedGradientTape(tape).gradient(loss, sources)
        tf.nest.map_structure(near, grads, make(*reference))


@pytest.mark.np(2)
def test_variables_of_keras_are_told_apart_by_identity() -> None:
    model, alone = Model(lambda value: tf.keras.Variable(value, dtype="float64", name="x")), Model()
    groups = [[model.hidden, model.output], [model.table]]
    for step in range(STEPS):
        tape, loss = local_tape(model, data(hvd.rank(), step))
        tape = hvd.DistributedGradientTape(tape, groups=groups)
        descend(model, tape.gradient(loss, model.variables))
        descend(alone, gradients(alone, joined(step)))
    for own, reference in zip(model.state(), alone.state(), strict=True):
        near(own, reference)


@pytest.mark.np(2)
def test_unconnected_gradients_can_be_zeros() -> None:
    model = Model()
    tape, loss = local_tape(model, data(hvd.rank()))
    grad = hvd.DistributedGradientTape(tape).gradient(
        loss, model.unused, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    near(grad, tf.zeros_like(model.unused))


@pytest.mark.np(2)
def test_watched_tensors_are_sources() -> None:
    x = tf.constant([1.0, 2.0], tf.float64) * (hvd.rank() + 1)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(x**2)
    grad = hvd.DistributedGradientTape(tape).gradient(loss, x)
    near(grad, tf.constant([2.0, 4.0], tf.float64) * np.mean(range(1, hvd.size() + 1)))


@pytest.mark.np(2)
def test_a_persistent_tape_gives_gradients_more_than_once() -> None:
    model = Model()
    tape, loss = local_tape(model, data(hvd.rank()), persistent=True)
    tape = hvd.DistributedGradientTape(tape)
    assert isinstance(tape, tf.GradientTape)
    assert tape._persistent
    assert [variable.ref() for variable in tape.watched_variables()] == [
        variable.ref() for variable in (model.table, model.hidden, model.output)
    ]
    for _ in range(2):
        near(tape.gradient(loss, model.hidden), gradients(model, joined())[1])


@pytest.mark.np(2)
def test_it_is_a_context_manager_and_keeps_the_class_of_a_tape() -> None:
    class Tape(tf.GradientTape):
        def mine(self) -> str:
            return "mine"

    model = Model()
    with hvd.DistributedGradientTape(Tape()) as tape:
        loss = model.loss(*data(hvd.rank()))
    assert isinstance(tape, Tape)
    assert tape.mine() == "mine"
    near(tape.gradient(loss, model.output), gradients(model, joined())[3])


@pytest.mark.np(2)
@pytest.mark.parametrize("inside", [False, True])
def test_a_tape_may_be_wrapped_while_it_records(inside: bool) -> None:
    model = Model()
    with tf.GradientTape(persistent=inside) as tape:
        distributed = hvd.DistributedGradientTape(tape)
        loss = model.loss(*data(hvd.rank()))
        if inside:
            grad = distributed.gradient(loss, model.output)
    if not inside:
        grad = distributed.gradient(loss, model.output)
    near(grad, gradients(model, joined())[3])


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_go_through_the_reduction(mode: str) -> None:
    w = tf.Variable([1.0, -2.0], dtype=tf.float64)
    scale = [float(rank + 1) for rank in range(hvd.size())]

    @MODES[mode]
    def second() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = scale[hvd.rank()] * tf.reduce_sum(w**3)
            first = hvd.DistributedGradientTape(inner).gradient(loss, w)
            norm = tf.reduce_sum(first**2)
        return hvd.DistributedGradientTape(outer).gradient(norm, w)

    # first = c * 3 w^2 with c the mean of the scales, and norm = 9 c^2 w^4 on every rank. What a
    # rank's own term adds to it is a scale / size of the sum over the ranks' norms.
    c = np.mean(scale)
    near(second(), 36 * c**2 * tf.convert_to_tensor(w) ** 3)


@pytest.mark.np(2)
def test_local_sources_stay_local() -> None:
    model, size = Model(), hvd.size()
    own, mean = gradients(model, data(hvd.rank())), gradients(model, joined())
    for scale in (True, False):
        tape, loss = local_tape(model, data(hvd.rank()))
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(model.table)
        tape.register_local_source(model.output)
        local, shared = tape.get_local_and_global_gradients(loss, model.variables)
        assert [id(v) for v, _ in local] == [id(model.table), id(model.output)]
        assert [id(v) for v, _ in shared] == [id(model.hidden), id(model.unused)]
        divisor = size if scale else 1
        near(local[0][1], tf.convert_to_tensor(own[0]) / divisor)
        near(local[1][1], own[3] / divisor)
        near(shared[0][1], mean[1])
        near(shared[1][1], None)


@pytest.mark.np(2)
def test_ranks_may_differ_in_the_layers_they_have_for_themselves() -> None:
    make = tf.keras.layers.Dense
    common = make(2, use_bias=False, kernel_initializer="ones", dtype="float64")
    # Rank 1 has a local layer more, in front of the common one.
    own = [make(2, kernel_initializer="ones", dtype="float64") for _ in range(hvd.rank() + 1)]
    x = tf.ones([1, 2], tf.float64) * (hvd.rank() + 1)

    def forward() -> Any:
        y = x
        for layer in (*own, common):
            y = layer(y)
        return tf.reduce_sum(y)

    with tf.GradientTape() as tape:
        loss = forward()
    variables = [weight for layer in (*own, common) for weight in layer.trainable_weights]
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=own)
    *_, grad = tape.gradient(loss, variables)
    inputs = [2.0 * 2**rank * (rank + 1) for rank in range(hvd.size())]
    near(grad, tf.fill([2, 2], tf.constant(np.mean(inputs), tf.float64)))


@pytest.mark.np(2)
def test_what_is_no_layer_is_refused() -> None:
    for layers in ("dense", [tf.Variable(1.0)], 3):
        with pytest.raises(ValueError, match="local_layers"):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layers)


@pytest.mark.np(3)
def test_who_is_outside_of_the_set_keeps_its_own_gradients() -> None:
    pair = hvd.add_process_set([0, 2])
    model = Model()
    tape, loss = local_tape(model, data(hvd.rank()))
    grads = hvd.DistributedGradientTape(tape, process_set=pair).gradient(loss, model.variables)
    members = [hvd.rank()] if hvd.rank() == 1 else [0, 2]
    batch = [tf.concat(part, 0) for part in zip(*map(data, members), strict=True)]
    for grad, reference in zip(grads, gradients(model, batch), strict=True):
        near(grad, reference)
    hvd.remove_process_set(pair)


@pytest.mark.np(2)
def test_compression_is_applied() -> None:
    model = Model()
    tape, loss = local_tape(model, data(hvd.rank()))
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    grad, exact = tape.gradient(loss, model.hidden), gradients(model, joined())[1]
    near(grad, exact, 1e-3)
    assert (grad.numpy() != exact.numpy()).any()


@pytest.mark.np(2)
def test_bad_arguments_are_refused() -> None:
    tape = tf.GradientTape()
    for options in (
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"groups": 0},
        {"groups": "all"},
        {"groups": True},
        {"op": 17},
    ):
        with pytest.raises(ValueError):
            hvd.DistributedGradientTape(tape, **options)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedGradientTape(tape, num_groups=2)
    with pytest.raises(TypeError):
        hvd.DistributedGradientTape(tf.Variable(1.0))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape))
    with pytest.raises(NotImplementedError):
        hvd.DistributedGradientTape(tape).jacobian(None, None)


# ---------------------------------------------------------------------------------------------
# C67: tf.function


@pytest.mark.np(2)
def test_two_models_with_a_tape_each_in_one_function() -> None:
    models, alone = [Model(), Model()], [Model(), Model()]
    for pair in (models, alone):
        pair[1].hidden.assign(pair[1].hidden * 2)

    @tf.function(autograph=False)
    def step(words: Any, numbers: Any, targets: Any) -> None:
        batch = (words, numbers, targets)
        tapes = [local_tape(model, batch) for model in models]
        # Each rank takes them in another order: it is the order of the program that counts.
        grads = [
            hvd.DistributedGradientTape(tape).gradient(loss, model.variables)
            for model, (tape, loss) in zip(models, tapes, strict=True)
        ]
        for model, grad in zip(models, grads, strict=True):
            descend(model, grad)

    for i in range(STEPS):
        step(*data(hvd.rank(), i))
        for model in alone:
            descend(model, gradients(model, joined(i)))
    for model, reference in zip(models, alone, strict=True):
        for own, other in zip(model.state(), reference.state(), strict=True):
            near(own, other)


@pytest.mark.np(2)
def test_tracing_again_on_one_rank_only_is_harmless() -> None:
    model, alone = Model(), Model()

    @tf.function(autograph=False)
    def step(words: Any, numbers: Any, targets: Any, flag: Any) -> None:
        tape, loss = local_tape(model, (words, numbers, targets))
        descend(model, hvd.DistributedGradientTape(tape).gradient(loss, model.variables))

    for i in range(STEPS):
        step(*data(hvd.rank(), i), i if hvd.rank() == 1 else 0)  # a new trace for each number
        descend(alone, gradients(alone, joined(i)))
    assert step.experimental_get_tracing_count() == (STEPS if hvd.rank() == 1 else 1)
    for own, reference in zip(model.state(), alone.state(), strict=True):
        near(own, reference)


@pytest.mark.np(2)
def test_adasum_in_a_function() -> None:
    w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    own = [tf.constant([1.0, 0.0], tf.float64), tf.constant([0.5, 1.0], tf.float64)]

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own[hvd.rank()] * w)
        return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, w)

    a, b = (one.numpy() for one in own)
    near(step(), tf.constant(a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b))))


@pytest.mark.np(2)
def test_a_condition_that_is_equal_on_all_ranks() -> None:
    model = Model()

    @tf.function
    def step(words: Any, numbers: Any, targets: Any, go: Any) -> Any:
        if go:
            with tf.GradientTape() as tape:
                loss = model.loss(words, numbers, targets)
            result = hvd.DistributedGradientTape(tape).gradient(loss, model.output)
        else:
            result = tf.zeros_like(model.output)
        return result

    near(step(*data(hvd.rank()), tf.constant(True)), gradients(model, joined())[3])
    near(step(*data(hvd.rank()), tf.constant(False)), tf.zeros_like(model.output))


@pytest.mark.np(2)
def test_a_loop_within_a_function() -> None:
    model, alone = Model(), Model()
    batches = [data(hvd.rank(), step) for step in range(STEPS)]
    stacked = [tf.stack(part) for part in zip(*batches, strict=True)]

    @tf.function
    def steps(words: Any, numbers: Any, targets: Any) -> None:
        for i in tf.range(STEPS):
            with tf.GradientTape() as tape:
                loss = model.loss(words[i], numbers[i], targets[i])
            tape = hvd.DistributedGradientTape(tape)
            descend(model, tape.gradient(loss, model.variables))

    steps(*stacked)
    for step in range(STEPS):
        descend(alone, gradients(alone, joined(step)))
    for own, reference in zip(model.state(), alone.state(), strict=True):
        near(own, reference)


@pytest.mark.np(2)
def test_a_function_that_xla_compiles() -> None:
    model = Model()

    @tf.function(jit_compile=True, autograph=False)
    def step(words: Any, numbers: Any, targets: Any) -> Any:
        tape, loss = local_tape(model, (words, numbers, targets))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True)
        return [grad for grad in tape.gradient(loss, model.variables) if grad is not None]

    reference = [grad for grad in gradients(model, joined()) if grad is not None]
    for grad, expected in zip(step(*data(hvd.rank())), reference, strict=True):
        near(grad, expected)


@pytest.mark.np(2)
def test_a_rank_that_is_late_changes_nothing() -> None:
    model = Model()
    for step in range(2):
        tape, loss = local_tape(model, data(hvd.rank(), step))
        if hvd.rank() == step:
            time.sleep(0.2)
        grads = hvd.DistributedGradientTape(tape).gradient(loss, model.variables)
        for grad, reference in zip(grads, gradients(model, joined(step)), strict=True):
            near(grad, reference)


@pytest.mark.np(2)
def test_gradients_whose_shapes_differ_are_named() -> None:
    shape = [2] if hvd.rank() == 0 else [3]
    w = tf.Variable(tf.ones(shape), name="w")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w)
    with pytest.raises(tf.errors.FailedPreconditionError, match="dense"):
        hvd.DistributedGradientTape(tape).gradient(loss, w)
    near(hvd.allreduce(tf.constant(1.0), op=hvd.Sum), tf.constant(float(hvd.size())))
