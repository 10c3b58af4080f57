"""The reduction of a list of gradients, as tapes and optimizers use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow import reduction
from laws import near

SHAPES = [(2, 3), None, (), (0,), (4, 2), (3,), (2,)]  # None: there is no gradient
SPARSE = 4  # whose gradient is IndexedSlices
MODES = {
    "eager": lambda function: function,
    "traced": lambda function: tf.function(function, autograph=False),
}


def gradients(rank: int, dtype: Any = tf.float64) -> list[Any]:
    """A rank's list. Ranks differ in how many rows of the sparse one they have."""
    random = np.random.default_rng([rank, 1])
    made: list[Any] = []
    for i, shape in enumerate(SHAPES):
        if shape is None:
            made.append(None)
        elif i == SPARSE:
            rows = random.integers(0, 4, rank + 2)
            values = tf.constant(random.normal(size=(rank + 2, 2)), dtype)
            made.append(tf.IndexedSlices(values, tf.constant(rows), tf.constant(shape, tf.int64)))
        else:
            made.append(tf.constant(random.normal(size=shape), dtype))
    return made


def expected(op: Any) -> list[Any]:
    each = [gradients(rank) for rank in range(hvd.size())]
    divisor = hvd.size() if op is hvd.Average else 1
    return [
        None if terms[0] is None else sum(map(tf.convert_to_tensor, terms)) / divisor
        for terms in zip(*each, strict=True)
    ]


def made(**options: Any) -> Any:
    arguments = {
        "name": "test",
        "device_dense": "",
        "device_sparse": "",
        "compression": hvd.Compression.none,
        "sparse_as_dense": False,
        "op": hvd.Average,
        "gradient_predivide_factor": 1.0,
        "groups": None,
        "process_set": hvd.global_process_set,
    }
    return reduction.make_allreduce_grads_fn(**{**arguments, **options})


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [None, 1, 3, 50, "variables"])
@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"op": hvd.Sum}], ids=str)
def test_lists_are_reduced_in_their_order(mode: str, groups: Any, options: dict[str, Any]) -> None:
    variables = [tf.Variable(0.0, name="same") for _ in SHAPES]
    if groups == "variables":
        groups = [[variables[6], variables[0], variables[SPARSE]], [variables[1]]]
    reduce = made(groups=groups, **options)

    @MODES[mode]
    def reduced() -> Any:
        own = gradients(hvd.rank())
        return [
            () if grad is None else grad for grad in reduce(own, variables, use_generic_names=True)
        ]

    results = [None if grad == () else grad for grad in reduced()]
    assert [i for i, grad in enumerate(results) if isinstance(grad, tf.IndexedSlices)] == (
        [] if "sparse_as_dense" in options else [SPARSE]
    )
    for grad, reference in zip(results, expected(options.get("op", hvd.Average)), strict=True):
        near(grad, reference)


@pytest.mark.np(2)
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_the_factor_divides_before_and_multiplies_after(factor: float) -> None:
    results = made(gradient_predivide_factor=factor)(gradients(hvd.rank()))
    for grad, reference in zip(results, expected(hvd.Average), strict=True):
        near(grad, reference)
    # Before the sum: what would overflow there doesn't. 60000 + 60000 is no float16.
    large = tf.constant([60000.0], tf.float16)
    assert np.isinf(made(op=hvd.Sum)([large])[0].numpy()).all()
    near(made(gradient_predivide_factor=2.0)([large])[0], large)


@pytest.mark.np(2)
def test_who_has_nobody_to_reduce_with_keeps_what_it_has() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    for process_set in sets:  # in one of them alone, outside of the other
        own = gradients(hvd.rank())
        for grad, result in zip(own, made(process_set=process_set)(own), strict=True):
            assert result is grad
        assert reduction.local_gradient(own[0], process_set) is own[0]
    for process_set in sets:
        hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="not registered"):
        made(process_set=sets[0])(own)


@pytest.mark.np(2)
def test_gradients_of_local_variables_are_divided() -> None:
    own = gradients(hvd.rank())
    for grad in own:
        scaled = reduction.local_gradient(grad, hvd.global_process_set)
        assert type(scaled) is type(grad)
        near(scaled, None if grad is None else tf.convert_to_tensor(grad) / hvd.size())


@pytest.mark.np(2)
def test_groups_of_variables_need_the_variables() -> None:
    with pytest.raises(ValueError, match="variables"):
        made(groups=[[tf.Variable(1.0)]])(gradients(hvd.rank()))


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("mode", "text"), [("eager", r"dense\": .*tensor 1 of the group"), ("traced", r"grad_1")]
)
def test_a_gradient_of_another_shape_is_an_error_on_all_ranks(mode: str, text: str) -> None:
    grads = [tf.ones([2]), tf.ones([3 + hvd.rank()])]
    with pytest.raises(tf.errors.FailedPreconditionError, match=text):
        MODES[mode](lambda: made()(grads))()
    near(made()([tf.ones([2])])[0], tf.ones([2]))


@pytest.mark.np(2)
def test_a_gradient_that_only_one_rank_has_is_an_error_at_once_in_eager_code() -> None:
    for other in (None, tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))):
        grads = [tf.ones([2]), tf.ones([3, 2]) if hvd.rank() else other, tf.ones([3, 2])]
        with pytest.raises(tf.errors.FailedPreconditionError):
            made()(grads[:2] if other is None else grads)
        near(made()([tf.ones([2])])[0], tf.ones([2]))


@pytest.mark.np(2)
def test_marks_are_on_the_objects_themselves() -> None:
    grads = gradients(hvd.rank())
    assert not any(map(reduction.is_reduced, grads))
    reduction.mark_reduced(grads)
    assert [reduction.is_reduced(grad) for grad in grads] == [grad is not None for grad in grads]
    assert not reduction.is_reduced(grads[0] + 1)
