"""Ranks start equal: variables and objects of the root reach all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError
from laws import near

DTYPES = [
    tf.float64,
    tf.float32,
    tf.float16,
    tf.bfloat16,
    tf.int64,
    tf.int32,
    tf.uint8,
    tf.bool,
    tf.complex64,
]


def mine(dtype: Any, rank: int, shape: Any = (2, 3)) -> Any:
    return tf.cast(tf.fill(shape, rank), dtype)


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("inplace", [False, True])
def test_variables_become_those_of_the_root(root: int, inplace: bool) -> None:
    variables = [tf.Variable(mine(dtype, hvd.rank())) for dtype in DTYPES]
    variables += [tf.Variable(mine(tf.float32, hvd.rank(), shape)) for shape in ([], [0], [3, 0])]
    assert hvd.broadcast_variables(variables, root, inplace=inplace) is None
    for variable in variables:
        expected = mine(variable.dtype, root, variable.shape)
        np.testing.assert_array_equal(variable.numpy(), expected.numpy())


@pytest.mark.np(2)
def test_variables_of_keras_and_their_seeds() -> None:
    seed = tf.keras.random.SeedGenerator(100 + hvd.rank())
    layer = tf.keras.layers.Dense(2)
    layer.build((None, 3))
    variables = [*layer.variables, seed.state, layer.kernel]  # one of them twice
    hvd.broadcast_variables(variables, 1)
    assert seed.state.numpy()[0] == 101
    kernels = hvd.allgather_object(layer.kernel.numpy())
    np.testing.assert_array_equal(*kernels)


@pytest.mark.np(2)
def test_an_empty_list_is_fine() -> None:
    assert hvd.broadcast_variables([], 0) is None


@pytest.mark.np(2)
def test_in_a_function_it_is_part_of_it() -> None:
    variables = [tf.Variable([float(hvd.rank())]), tf.Variable(hvd.rank() + 5)]

    @tf.function
    def step() -> Any:
        hvd.broadcast_variables(variables, 1)
        return tf.cast(variables[1], tf.float32) + variables[0]

    near(step(), tf.constant([7.0]))
    near(variables[0], tf.constant([1.0]))


def unequal(what: str) -> list[tf.Variable]:
    """A list in which rank 1 has something else, and what the error says."""
    first = tf.Variable(1.0, name="first")
    shape, dtype = [2], tf.float32
    if hvd.rank() == 1:
        if what == "shape":
            shape = [3]
        elif what == "type":
            dtype = tf.float64
        else:
            return [first]
    return [first, tf.Variable(tf.zeros(shape, dtype), name="second")]


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("what", "here", "there"),
    [
        ("shape", r"float32 \[2\]", r"float32 \[3\]"),
        ("type", r"float32 \[2\]", r"float64 \[2\]"),
        ("number", r"float32 \[2\]", "missing"),
    ],
)
def test_what_differs_is_named_on_all_ranks(what: str, here: str, there: str) -> None:
    text = rf'"second:0", is {here} on rank 0 but {there} on rank 1'
    with pytest.raises(tf.errors.FailedPreconditionError, match=text):
        hvd.broadcast_variables(unequal(what), 0)
    hvd.broadcast_variables([tf.Variable(1.0)], 0)  # everything is usable afterwards


@pytest.mark.np(2)
@pytest.mark.parametrize("what", ["tensor", "one variable", "number"])
def test_what_is_no_variable_is_an_error_everywhere(what: str) -> None:
    variable = tf.Variable([1.0])
    wrong = {"tensor": [tf.constant([1.0])], "one variable": variable, "number": [variable, 1]}
    error = TypeError if hvd.rank() == 1 else tf.errors.FailedPreconditionError
    with pytest.raises(error):
        hvd.broadcast_variables(wrong[what] if hvd.rank() == 1 else [variable], 0)
    hvd.broadcast_variables([variable], 0)


@pytest.mark.np(2)
def test_a_root_that_is_none_is_refused() -> None:
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        hvd.broadcast_variables([tf.Variable(1.0)], 2)


@pytest.mark.np(3)
def test_sets_take_part_by_themselves() -> None:
    pair = hvd.add_process_set([0, 2])
    variable = tf.Variable(float(hvd.rank()))
    if hvd.rank() != 1:
        hvd.broadcast_variables([variable], 2, process_set=pair)
        assert hvd.broadcast_object(hvd.rank(), 2, process_set=pair) == 2
        assert hvd.allgather_object(hvd.rank(), process_set=pair) == [0, 2]
    near(variable, tf.constant([2.0, 1.0, 2.0][hvd.rank()]))
    hvd.remove_process_set(pair)


@pytest.mark.np(2)
def test_global_variables_are_a_thing_of_graphs() -> None:
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = [
            tf.compat.v1.Variable([1.0 + hvd.rank()], use_resource=resource)
            for resource in (True, False)
        ]
        operation = hvd.broadcast_global_variables(1)
        assert isinstance(operation, tf.Operation)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(operation)
        for value in session.run(made):
            np.testing.assert_array_equal(value, [2.0])


@pytest.mark.np(2)
def test_the_hook_broadcasts_when_the_session_is_there() -> None:
    hook = hvd.BroadcastGlobalVariablesHook(1)
    for _ in range(2):  # a hook can be used in one graph after another
        with tf.Graph().as_default():
            variable = tf.compat.v1.Variable([1.0 + hvd.rank()])
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                np.testing.assert_array_equal(session.run(variable), [2.0])


@pytest.mark.np(2)
def test_the_hook_names_what_differs() -> None:
    with tf.Graph().as_default():
        tf.compat.v1.Variable(tf.zeros([2 + hvd.rank()]), name="w")
        hook = hvd.BroadcastGlobalVariablesHook(0)
        with pytest.raises(tf.errors.FailedPreconditionError, match=r'"w:0", is float32 \[2\]'):
            tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook])


@pytest.mark.np(2)
def test_objects_of_any_kind() -> None:
    value = {"rank": hvd.rank(), "array": np.arange(5) + hvd.rank(), "f": lambda x: x + 1}
    got = hvd.broadcast_object(value, 1)
    assert got["rank"] == 1
    assert got["f"](1) == 2
    np.testing.assert_array_equal(got["array"], np.arange(5) + 1)
    assert (got is value) == (hvd.rank() == 1)
    assert hvd.broadcast_object_fn(1, name="again")(hvd.rank()) == 1
    assert hvd.allgather_object({hvd.rank()}, name="all") == [{0}, {1}]


@pytest.mark.np(2)
def test_an_object_that_cannot_travel_is_an_error_everywhere() -> None:
    value = (i for i in range(3)) if hvd.rank() == 0 else None
    with pytest.raises(HorovodInternalError, match="rank 0 could not pickle"):
        hvd.broadcast_object(value, 0)
    assert hvd.broadcast_object("usable", 0) == "usable"
