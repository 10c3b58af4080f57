"""Collectives in functions that XLA compiles: those of any function, at their place, every time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
from horovod.common import basics, ops
from horovod.tensorflow import xla
from laws import Model, data, descend, gradients, joined, near


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return tf.function(function, jit_compile=True, **options)


def plain(function: Callable[..., Any]) -> Any:
    return tf.function(function)


def own(*shape: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Small numbers of this rank's own, exact in every type."""
    draw = np.random.default_rng(hvd.rank())
    return tf.cast(tf.constant(draw.integers(0, 5, shape)), dtype)


def same(found: Any, expected: Any) -> None:
    """Equal bit for bit, structures of tensors too."""
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@contextmanager
def calls_made(number: int) -> Iterator[None]:
    """Exactly so many calls reach the engine inside of it."""
    before = basics.engine().counters()["calls"]
    yield
    assert basics.engine().counters()["calls"] - before == number


# ---- Results ------------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[tf.Tensor], Any]] = {
    "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "max": lambda x: hvd.allreduce(x, op=hvd.Max, name='of "all"\\ \u00e9'),
    "scaled": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2, postscale_factor=0.5),
    "scalar": lambda x: hvd.allreduce(x[0, 0], op=hvd.Sum),
    "empty": lambda x: hvd.allreduce(x[:0], op=hvd.Sum),
    "group": lambda x: hvd.grouped_allreduce(
        [x, tf.cast(x, tf.int64), x[0], tf.cast(x, tf.float64)], op=hvd.Sum
    ),
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    "a group's reducescatter": lambda x: hvd.grouped_reducescatter([x, x[:1]], op=hvd.Sum),
}
COPIES: dict[str, Callable[[tf.Tensor], Any]] = {
    "broadcast": lambda x: hvd.broadcast(x, hvd.size() - 1),
    "alltoall": lambda x: hvd.alltoall(tf.concat([x] * hvd.size(), 0)),
}


@pytest.mark.np(2)
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int64, tf.uint8, tf.bool])
def test_results_are_those_of_eager_calls(dtype: tf.DType) -> None:
    check_results(dtype)


def check_results(dtype: tf.DType) -> None:
    x = own(3, 2, dtype=dtype)
    cases = {**COPIES, **({} if dtype == tf.bool else REDUCTIONS)}
    results = compiled(lambda x: {name: call(x) for name, call in cases.items()})(x)
    assert results.keys() == cases.keys()
    for name, result in results.items():
        same(result, cases[name](x))


@pytest.mark.np(2)
def test_every_type() -> None:
    values = [own(3, dtype=tf.as_dtype(dtype.name)) for dtype in ops.DType]
    function = compiled(lambda values: [hvd.broadcast(value, 1) for value in values])
    same(function(values), [hvd.broadcast(value, 1) for value in values])
    complex_numbers = tf.complex(own(3, dtype=tf.float64), tf.ones(3, tf.float64))
    same(compiled(hvd.allreduce)(complex_numbers), hvd.allreduce(complex_numbers))


@pytest.mark.np(2)
def test_shapes_may_be_known_as_late_as_when_xla_compiles() -> None:
    unknown = tf.TensorSpec([None, 3], tf.float32)

    def calls(x: tf.Tensor) -> Any:
        return (
            hvd.grouped_allreduce([x, x[:, 0], x[0], tf.reduce_sum(x)], op=hvd.Sum),
            hvd.reducescatter(x, op=hvd.Sum),
            hvd.broadcast(x, 0),
            hvd.alltoall(tf.concat([x, x], 0)),
        )

    function = compiled(calls, input_signature=[unknown])
    for rows in (4, 5):
        same(function(own(rows, 3)), calls(own(rows, 3)))


@pytest.mark.np(2)
def test_a_set_of_one_rank() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    mine = sets[hvd.rank()]
    x = own(3)
    same(compiled(lambda x: hvd.allreduce(x, process_set=mine))(x), x)
    same(compiled(lambda x: hvd.reducescatter(x, process_set=mine))(x), x)
    other = sets[1 - hvd.rank()]
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {hvd.rank()} is no member"):
        compiled(lambda x: hvd.reducescatter(x, process_set=other))(x)
    for one in sets:
        assert hvd.remove_process_set(one)


# ---- Gradients ----------------------------------------------------------------------------------

DIFFERENTIABLE: dict[str, Callable[[tf.Tensor], Any]] = {
    "allreduce": lambda x: hvd.allreduce(x, prescale_factor=2.0),
    "group": lambda x: hvd.grouped_allreduce([x, tf.constant([1, 2]), 3 * x], op=hvd.Sum)[2],
    "broadcast": lambda x: hvd.broadcast(x, 1),
    "reducescatter": lambda x: hvd.reducescatter(x[:3], op=hvd.Sum),
    "alltoall": lambda x: hvd.alltoall(x),
}


@pytest.mark.np(2)
@pytest.mark.parametrize("case", DIFFERENTIABLE)
def test_gradients_to_the_second_order_are_those_of_plain_functions(case: str) -> None:
    collective = DIFFERENTIABLE[case]

    def orders(x: tf.Tensor) -> Any:
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                loss = tf.reduce_sum(collective(x * x) ** 3) * (hvd.rank() + 1.0)
            gradient = first.gradient(loss, x)
            again = tf.reduce_sum(gradient**2)
        return loss, gradient, second.gradient(again, x)

    x = own(4, dtype=tf.float64) + 1.0
    for found, expected in zip(compiled(orders)(x), plain(orders)(x), strict=True):
        near(found, expected)
        assert np.any(expected) or (case == "broadcast" and hvd.rank() == 0)


@pytest.mark.np(2)
def test_the_second_gradient_of_a_broadcast_is_a_call_of_every_rank() -> None:
    """Though the first is zero on all but the root; its square has none at all there."""

    def second(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(hvd.broadcast(x, 0) ** 3)
            gradient = inner.gradient(loss, x)
            again = tf.reduce_sum(gradient)
        return gradient, outer.gradient(again, x)

    x = tf.constant([1.0, 2.0], tf.float64)
    first, then = plain(second)(x)
    near(first, 3 * x**2 if hvd.rank() == 0 else 0 * x)
    # the mean of 3 x^2 counts at the root, and depends on the root's x through both losses
    near(then, 3 * x if hvd.rank() == 0 else 0 * x)


@pytest.mark.np(2)
def test_a_gradient_through_a_loop() -> None:
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = hvd.allreduce(y * y)
        return tape.gradient(y, x)

    x = own(3, dtype=tf.float64) / 4.0
    near(compiled(gradient)(x), plain(gradient)(x))


# ---- Every call runs, at its place --------------------------------------------------------------


@pytest.mark.np(2)
def test_no_call_is_dropped_merged_hoisted_or_folded() -> None:
    constant = tf.ones(3)

    def calls(x: tf.Tensor) -> tf.Tensor:
        hvd.allreduce(x)  # nobody uses it
        hvd.broadcast(x, 0, name="unused")
        total = hvd.allreduce(x, op=hvd.Sum, name="same") + hvd.allreduce(
            x, op=hvd.Sum, name="same"
        )
        for _ in tf.range(3):
            total += hvd.allreduce(constant, op=hvd.Sum)
        return total + hvd.allreduce(constant, op=hvd.Sum)

    function = compiled(calls)
    x = own(3)
    expected = 2 * hvd.allreduce(x, op=hvd.Sum) + 4 * 2.0
    for _ in range(2):
        with calls_made(8):
            same(function(x), expected)


@pytest.mark.np(2)
def test_a_branch_runs_the_calls_that_are_in_it() -> None:
    def one_of_two(x: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
        x = hvd.allreduce(x, op=hvd.Sum)
        if left:
            x = hvd.allreduce(x, op=hvd.Sum)
            x = hvd.allreduce(x, op=hvd.Sum)
        return hvd.allreduce(x, op=hvd.Sum)

    function = compiled(one_of_two)
    for left, number in ((True, 4), (False, 2)):
        with calls_made(number):
            same(function(tf.ones(2), tf.constant(left)), tf.fill([2], 2.0**number))


@pytest.mark.np(2)
def test_independent_calls_keep_their_order_in_programs_that_differ() -> None:
    number = 12

    def calls(xs: list[tf.Tensor]) -> tf.Tensor:
        results = []
        for i, x in enumerate(xs):
            y = x
            for _ in range((7 * i + 13 * hvd.rank()) % 5):
                y = tf.matmul(y, y) / 64.0
            results.append(hvd.allreduce(x + 0.0 * y, op=hvd.Sum))
        return tf.add_n(results)

    xs = [own(32, 32) for _ in range(number)]
    function = compiled(calls, autograph=False)
    expected = number * hvd.allreduce(xs[0], op=hvd.Sum)
    for _ in range(5):
        same(function(xs), expected)


@pytest.mark.np(2)
def test_one_rank_may_trace_again() -> None:
    @tf.function(jit_compile=True)
    def function(x: tf.Tensor, flag: int) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum) * hvd.allreduce(2 * x, op=hvd.Sum)

    for flag in (0, 0, 1, 2):
        own_flag = flag if hvd.rank() == 0 else 0
        same(function(tf.ones(2), own_flag), tf.fill([2], 8.0))
    assert function.experimental_get_tracing_count() == (3 if hvd.rank() == 0 else 1)


@pytest.mark.np(2)
def test_threads_that_run_one_function_take_turns() -> None:
    function = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))
    x = tf.ones(4)
    function(x)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.extend(function(x) for _ in range(20)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 60
    for result in results:
        same(result, tf.fill([4], 2.0))


@pytest.mark.np(2)
def test_compiled_functions_between_the_calls_of_a_plain_one() -> None:
    """They block, on threads that those calls may have woken."""
    inner = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))

    def function(x: tf.Tensor) -> tf.Tensor:
        for _ in range(3):
            x = inner(hvd.allreduce(x, op=hvd.Sum))
            x += hvd.allreduce(x, op=hvd.Max)
        return x

    for _ in range(5):
        same(plain(function)(tf.ones(2)), tf.fill([2], 512.0))


CLUSTERS = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2"


@pytest.mark.np(1, env={"TF_XLA_FLAGS": CLUSTERS})
def test_one_rank_and_automatic_clusters_which_leave_calls_out() -> None:
    """Both in one world, whose start takes longer than all tests here."""
    check_results(tf.float32)

    def function(x: tf.Tensor) -> tf.Tensor:
        return tf.exp(-hvd.allreduce(tf.exp(-x) * 2.0, op=hvd.Sum)) + 1.0

    context.enable_run_metadata()
    near(plain(function)(tf.ones(4)), function(tf.ones(4)), 1e-6)
    graphs = context.export_run_metadata().partition_graphs
    context.disable_run_metadata()
    operators = [node.op for graph in graphs for node in graph.node]
    assert operators.count("_XlaRun") == 2
    assert "HorovodAllreduce" in operators


# ---- What goes wrong ----------------------------------------------------------------------------


@pytest.mark.np(2)
def test_a_mismatch_is_an_error_on_every_rank_and_nothing_else_is_lost() -> None:
    function = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, name="rows"))
    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"^HorovodAllreduce: .*rows.*"):
            function(tf.ones(2 + hvd.rank()))
        same(function(tf.ones(2)), tf.fill([2], 2.0))


@pytest.mark.np(2)
def test_this_ranks_wrong_call_is_an_error_on_every_rank() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"^HorovodBroadcast: .*root"):
        compiled(lambda x: hvd.broadcast(x, 7))(tf.ones(2))
    with pytest.raises(ValueError, match="no rows to scatter"):
        compiled(lambda x: hvd.reducescatter(x))(tf.constant(1.0))
    same(compiled(hvd.allreduce)(tf.ones(2)), tf.ones(2))


@pytest.mark.np(2)
def test_a_function_outlives_the_engine_that_it_was_traced_with() -> None:
    function = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))
    same(function(tf.ones(2)), tf.fill([2], 2.0))
    hvd.shutdown()
    try:
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"^HorovodAllreduce: .*init"):
            function(tf.ones(2))
    finally:
        hvd.init()
    same(function(tf.ones(2)), tf.fill([2], 2.0))


@pytest.mark.np(2, env={})
def test_what_ends_under_way_is_no_call_before_init() -> None:
    function = compiled(lambda x: hvd.allreduce(x, name="nobody else makes it"))
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    with pytest.raises(tf.errors.UnknownError, match=r"^HorovodAllreduce: .*rank 1"):
        function(tf.ones(2))


@pytest.mark.np(2)
def test_results_of_another_shape_than_was_compiled_are_an_error() -> None:
    rows = 2 * (1 + hvd.rank())
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"^HorovodAlltoall: .*shape \[3\]"):
        compiled(lambda x: hvd.alltoall(x))(tf.ones(rows))
    same(compiled(hvd.allreduce)(tf.ones(2)), tf.ones(2))


@pytest.mark.np(2)
def test_what_xla_cannot_do_is_said_to_every_rank_when_a_function_is_traced() -> None:
    impossible: dict[str, tuple[Callable[[tf.Tensor], Any], str]] = {
        "allgather": (lambda x: hvd.allgather(x, name="impossible"), "how many rows"),
        "slices": (
            lambda x: hvd.allreduce(tf.IndexedSlices(x, tf.constant([0, 1]))).values,
            "sparse_as_dense=True",
        ),
        "alltoall": (lambda x: hvd.alltoall(x, splits=[1, 1]), "leave out splits"),
    }
    for call, why in impossible.values():
        with pytest.raises(tf.errors.UnimplementedError, match=why):
            compiled(call)(tf.ones(2))
    unknown = tf.TensorSpec(None, tf.float32)
    with pytest.raises(tf.errors.UnimplementedError, match="ensure_shape"):
        compiled(hvd.allreduce, input_signature=[unknown])(tf.ones(2))

    # a rank that could make the call learns that the other can't
    call = impossible["allgather"][0]
    if hvd.rank() == 0:
        with pytest.raises(tf.errors.UnimplementedError):
            compiled(call)(tf.ones(2))
    else:
        with pytest.raises(tf.errors.FailedPreconditionError, match="jit_compile"):
            call(tf.ones(2))
    same(compiled(hvd.allreduce)(tf.ones(2)), tf.ones(2))


@pytest.mark.np(2)
def test_devices_and_builds_without_a_handler_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
        with pytest.raises(tf.errors.UnimplementedError, match=r"for a GPU.*or use jit_compile"):
            compiled(lambda x: hvd.allreduce(x))(tf.ones(2))
        with tf.device("/CPU:0"):
            same(compiled(lambda x: hvd.allreduce(x))(tf.ones(2)), tf.ones(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "register_with_xla", lambda: "this TensorFlow lacks something")
        with pytest.raises(
            tf.errors.UnimplementedError, match="lacks something; or use jit_compile=False"
        ):
            compiled(lambda x: hvd.allreduce(x))(tf.ones(2))


@pytest.mark.np(2)
def test_a_function_that_was_traced_outside_of_xla_is_refused_inside() -> None:
    inner = plain(hvd.allreduce)
    inner(tf.ones(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"HorovodAllreduce.*XLA_CPU_JIT"):
        compiled(lambda x: inner(x))(tf.ones(2))


# ---- Training -----------------------------------------------------------------------------------


@pytest.mark.np(2)
def test_a_compiled_step_with_the_tape_is_that_of_one_process_in_one_call() -> None:
    model, alone = Model(), Model()

    @tf.function(jit_compile=True)
    def grads_of(words: Any, numbers: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(words, numbers, targets)
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True)
        return tape.gradient(loss, model.variables)

    for step in range(3):
        with calls_made(1):
            grads = grads_of(*data(hvd.rank(), step))
        descend(model, grads)
        descend(alone, gradients(alone, joined(step)))
    for found, expected in zip(model.state(), alone.state(), strict=True):
        near(found, expected)


@pytest.mark.np(2)
def test_fit_compiled_by_xla_is_fit() -> None:
    def fitted(jit: bool, steps: int) -> list[Any]:
        draw = np.random.default_rng(3)
        layers = [tf.keras.Input((3,)), tf.keras.layers.Dense(4), tf.keras.layers.Dense(1)]
        model = tf.keras.Sequential(layers)
        model.set_weights([draw.normal(size=weight.shape) for weight in model.get_weights()])
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.05))
        model.compile(optimizer=optimizer, loss="mse", jit_compile=jit, steps_per_execution=steps)
        x = own(8, 3)
        with calls_made(4 if jit else 4 * len(model.trainable_variables)):
            model.fit(x, tf.reduce_sum(x, 1), batch_size=2, shuffle=False, verbose=0)
        return [tf.constant(weight) for weight in model.get_weights()]

    expected = fitted(False, 1)
    for steps in (1, 2):
        for weight, should in zip(fitted(True, steps), expected, strict=True):
            near(weight, should, 1e-5)
            same(hvd.broadcast(weight, 0), weight)
