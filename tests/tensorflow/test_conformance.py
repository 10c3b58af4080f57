"""Every collective x form x data type x shape, eagerly and traced, as NumPy computes it.

Each rank makes the tensors of all ranks from seeds, so it knows what must come out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64"]
EVERYTHING = [*INTEGERS, *FLOATS, "bool", "complex64", "complex128"]
SHAPES = [(), (3, 0, 2), (1003,)]
MODES = ["eager", "traced"]


def made(shape: Sequence[int], dtype: str, rank: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Small integers: every type holds them and their sums and products exactly."""
    generator = np.random.default_rng([seed, rank, len(shape)])
    values = generator.integers(0, 2 if dtype == "bool" else 5, shape)
    return np.asarray(values).astype(tf.as_dtype(dtype).as_numpy_dtype)


def terms(shape: Sequence[int], dtype: str, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    return [made(shape, dtype, rank, seed) for rank in range(hvd.size())]


def run(mode: str, function: Callable[[], Any]) -> Any:
    return function() if mode == "eager" else tf.function(function)()


def same(got: Any, expected: np.ndarray[Any, Any], op: int = hvd.Sum) -> None:
    """Equal bit for bit; a mean may have been multiplied where this file divides."""
    value = got.numpy()
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    rounds = op == hvd.Average and np.issubdtype(expected.dtype, np.inexact)
    rtol = 2 * float(ml_dtypes.finfo(expected.dtype).eps) if rounds else 0
    np.testing.assert_allclose(value, expected, rtol)


REDUCE: dict[int, Callable[[Any, Any], Any]] = {
    hvd.Sum: lambda a, b: a | b if a.dtype == bool else a + b,
    hvd.Min: np.minimum,
    hvd.Max: np.maximum,
    hvd.Product: lambda a, b: a & b if a.dtype == bool else a * b,
}


def reduced(values: Sequence[np.ndarray[Any, Any]], op: int) -> np.ndarray[Any, Any]:
    if op == hvd.Average:
        total = np.sum([value.astype(np.complex128) for value in values], axis=0) / len(values)
        real = total if np.iscomplexobj(values[0]) else total.real
        whole = np.issubdtype(values[0].dtype, np.integer)
        return np.asarray(np.trunc(real) if whole else real).astype(values[0].dtype)
    fold = functools.reduce(REDUCE[op], values)
    return np.asarray(fold).astype(values[0].dtype)


def ops_of(dtype: str) -> list[int]:
    if dtype == "bool":
        return [hvd.Sum, hvd.Product]
    if dtype.startswith("complex"):
        return [hvd.Sum, hvd.Average]
    return [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]


def check_reductions(mode: str) -> None:
    cases = [(dtype, op, shape) for dtype in EVERYTHING for op in ops_of(dtype) for shape in SHAPES]

    def work() -> Any:
        return [
            hvd.allreduce(made(shape, dtype, hvd.rank(), i), op=op)
            for i, (dtype, op, shape) in enumerate(cases)
        ]

    for i, (got, (dtype, op, shape)) in enumerate(zip(run(mode, work), cases, strict=True)):
        same(got, reduced(terms(shape, dtype, i), op), op)


@pytest.mark.np(2)
def test_reductions_eager() -> None:
    check_reductions("eager")


@pytest.mark.np(1, 2, 3)
def test_reductions_traced() -> None:
    check_reductions("traced")


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_groups_of_all_types(mode: str) -> None:
    for op in (hvd.Sum, hvd.Average):
        types = [dtype for dtype in EVERYTHING if op in ops_of(dtype)]
        values = [made((5,), dtype, hvd.rank()) for dtype in types]
        outputs = run(mode, lambda values=values, op=op: hvd.grouped_allreduce(values, op=op))
        for got, dtype in zip(outputs, types, strict=True):
            same(got, reduced(terms((5,), dtype), op), op)


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_factors_are_doubles(mode: str) -> None:
    value = tf.constant([1.0 + hvd.rank(), 3.0], tf.float64)

    def work() -> Any:
        return hvd.allreduce(value, op=hvd.Sum, prescale_factor=0.1, postscale_factor=1 / 3)

    expected = (np.array([1.0, 3.0]) * 0.1 + np.array([2.0, 3.0]) * 0.1) * (1 / 3)
    np.testing.assert_allclose(run(mode, work).numpy(), expected, rtol=1e-15)


def check_gathers(mode: str) -> None:
    """Case C21: ranks with other and with no rows; the static shape knows the rest."""
    rows = [[r * (i + 1) for r in range(hvd.size())] for i in range(2)] + [[0] * hvd.size()]
    mine = [count[hvd.rank()] for count in rows]
    values = {dtype: [made((n, 5, 2), dtype, hvd.rank()) for n in mine] for dtype in EVERYTHING}

    def work() -> Any:
        singles, groups = [], []
        for tensors in values.values():
            singles += [hvd.allgather(tensor) for tensor in tensors]
            groups += hvd.grouped_allgather(tensors)
        if mode == "traced":
            assert all(tuple(t.shape) == (None, 5, 2) for t in [*singles, *groups])
        return singles, groups

    for outputs in run(mode, work):
        for k, got in enumerate(outputs):
            dtype, counts = EVERYTHING[k // 3], rows[k % 3]
            same(got, np.concatenate([made((n, 5, 2), dtype, r) for r, n in enumerate(counts)]))


@pytest.mark.np(2)
def test_gathers_eager() -> None:
    check_gathers("eager")


@pytest.mark.np(1, 2, 4)
def test_gathers_traced() -> None:
    check_gathers("traced")


def check_broadcasts(mode: str) -> None:
    cases = [(dtype, shape) for dtype in EVERYTHING for shape in SHAPES]
    for root in range(hvd.size()):

        def work(root: int = root) -> Any:
            return [hvd.broadcast(made(s, d, hvd.rank()), root) for d, s in cases]

        for got, (dtype, shape) in zip(run(mode, work), cases, strict=True):
            same(got, made(shape, dtype, root))


@pytest.mark.np(2)
def test_broadcasts_eager() -> None:
    check_broadcasts("eager")


@pytest.mark.np(2, 3)
def test_broadcasts_traced() -> None:
    check_broadcasts("traced")


def check_alltoall(mode: str) -> None:
    n, r = hvd.size(), hvd.rank()
    splits = [[(y + m) % 3 for m in range(n)] for y in range(n)]

    def work() -> Any:
        return [
            (
                hvd.alltoall(made((2 * n, 3), dtype, r)),
                *hvd.alltoall(made((sum(splits[r]) + 1, 3), dtype, r), splits[r]),
            )
            for dtype in EVERYTHING
        ]

    for (equal, output, received), dtype in zip(run(mode, work), EVERYTHING, strict=True):
        same(
            equal, np.concatenate([made((2 * n, 3), dtype, y)[2 * r : 2 * r + 2] for y in range(n)])
        )
        parts = []
        for y in range(n):
            start = sum(splits[y][:r])
            parts.append(made((sum(splits[y]) + 1, 3), dtype, y)[start : start + splits[y][r]])
        same(output, np.concatenate(parts))
        assert received.dtype == tf.int32
        assert received.numpy().tolist() == [splits[y][r] for y in range(n)]


@pytest.mark.np(2)
def test_alltoall_eager() -> None:
    check_alltoall("eager")


@pytest.mark.np(1, 2, 3)
def test_alltoall_traced() -> None:
    check_alltoall("traced")


def check_reducescatter(mode: str) -> None:
    n, r = hvd.size(), hvd.rank()
    types = [dtype for dtype in EVERYTHING if dtype != "bool"]
    for op in (hvd.Sum, hvd.Average):
        for rows in (n + 1, 1, 0):
            first = rows // n * r + min(r, rows % n)
            count = rows // n + (r < rows % n)
            values = [made((rows, 3), dtype, r) for dtype in types]

            def work(values: Any = values, op: int = op) -> Any:
                singles = [hvd.reducescatter(value, op=op) for value in values]
                return singles, hvd.grouped_reducescatter(values, op=op)

            for outputs in run(mode, work):
                for got, dtype in zip(outputs, types, strict=True):
                    same(got, reduced(terms((rows, 3), dtype), op)[first : first + count], op)


@pytest.mark.np(2)
def test_reducescatter_eager() -> None:
    check_reducescatter("eager")


@pytest.mark.np(1, 2, 3)
def test_reducescatter_traced() -> None:
    check_reducescatter("traced")


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_slices(mode: str) -> None:
    """Rows are gathered and scaled; each keeps its own dense shape, in groups as well."""
    r = hvd.rank()
    one = tf.IndexedSlices(
        tf.fill([r + 1, 2], 4.0), tf.range(r + 1), dense_shape=tf.constant([5, 2])
    )
    other = tf.IndexedSlices(
        tf.fill([1, 3], 1.0 + r), tf.constant([r], tf.int64), tf.constant([2, 3], tf.int64)
    )
    bare = tf.IndexedSlices(tf.fill([1, 3], 8.0), tf.constant([0]))

    def work() -> Any:
        mean = hvd.allreduce(one)
        total = hvd.allreduce(one, op=hvd.Sum)
        group = hvd.grouped_allreduce([one, tf.constant(1.0 + r), other, bare])
        return mean, total, group

    mean, total, group = run(mode, work)
    assert tf.convert_to_tensor(mean).numpy().tolist() == [[4, 4], [2, 2], [0, 0], [0, 0], [0, 0]]
    assert tf.convert_to_tensor(total).numpy()[:2].tolist() == [[8, 8], [4, 4]]
    assert tf.convert_to_tensor(group[0]).numpy()[:2].tolist() == [[4, 4], [2, 2]]
    assert group[1].numpy() == 1.5
    assert tf.convert_to_tensor(group[2]).numpy().tolist() == [[0.5] * 3, [1.0] * 3]
    assert group[2].indices.dtype == tf.int64
    assert group[3].dense_shape is None and group[3].values.numpy().tolist() == [[4.0] * 3] * 2
    for wrong in ({"op": hvd.Min}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
        with pytest.raises(NotImplementedError):
            hvd.allreduce(one, **wrong)


@pytest.mark.np(2)
def test_values_that_convert() -> None:
    r = hvd.rank()
    for value in (
        tf.Variable([1.0 + r]),
        np.array([1.0 + r], np.float32),
        [1.0 + r],
        tf.keras.Variable([1.0 + r]),
    ):
        assert hvd.allreduce(value).numpy().tolist() == [1.5]
    assert hvd.allreduce(r, op=hvd.Sum).numpy() == 1
    assert hvd.grouped_allreduce([]) == [] and hvd.grouped_allgather([]) == []


@pytest.mark.np(2)
def test_variables_are_overwritten() -> None:
    variables = [tf.Variable([1.0 + hvd.rank()]), tf.Variable(hvd.rank(), dtype=tf.int64)]
    values = hvd.broadcast_(variables, 1)
    assert [v.numpy().tolist() for v in variables] == [[2.0], 1]
    assert [v.numpy().tolist() for v in values] == [[2.0], 1]
    with pytest.raises(ValueError, match="no variable"):
        hvd.broadcast_([tf.constant(1.0)], 0)


@pytest.mark.np(2, 3)
def test_average_and_its_older_form() -> None:
    value = tf.constant(1.0 + hvd.rank())
    with pytest.warns(DeprecationWarning):
        assert hvd.allreduce(value, False).numpy() == sum(range(1, hvd.size() + 1))
    with pytest.raises(ValueError, match="op or average"):
        hvd.allreduce(value, average=True, op=hvd.Sum)


@pytest.mark.np(1, 3)
def test_numbers_of_the_world() -> None:
    def work() -> Any:
        return (
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
            hvd.process_set_included_op(17),
        )

    expected = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1, -3]
    for mode in MODES:
        assert [number.numpy() for number in run(mode, work)] == expected
    with pytest.raises(ValueError, match="no process set 17"):
        hvd.size_op(17)
