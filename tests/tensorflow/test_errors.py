"""What goes wrong: typed errors on every rank that is concerned, and a world that goes on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

MODES = ["eager", "traced"]
errors = tf.errors


def run(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments) if mode == "eager" else tf.function(function)(*arguments)


def still_works() -> None:
    total = hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="still works")
    assert total.numpy().tolist() == [hvd.size()] * 2


@pytest.mark.np(3)
@pytest.mark.parametrize("mode", MODES)
def test_shapes_that_differ(mode: str) -> None:
    """Case C28: every rank learns who sent what, also once the engine knows the call."""

    @tf.function(reduce_retracing=True)
    def traced(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, name="disagreed")

    reduce = traced if mode == "traced" else lambda x: hvd.allreduce(x, name="disagreed")
    for _ in range(3):
        assert reduce(tf.ones([17, 3])).shape == (17, 3)
    columns = 4 if hvd.rank() == 2 else 3
    with pytest.raises(errors.FailedPreconditionError, match="HorovodAllreduce") as caught:
        reduce(tf.ones([17, columns]))
    assert re.search(r"\[17, 3\].*\[17, 4\]|\[17, 4\].*\[17, 3\]", str(caught.value))
    assert "disagreed" in str(caught.value)
    for _ in range(2):
        assert reduce(tf.ones([17, 3])).shape == (17, 3)
    still_works()


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_whatever_differs(mode: str) -> None:
    odd = hvd.rank() == 1
    cases: dict[str, Callable[[], Any]] = {
        "type": lambda: hvd.allreduce(tf.ones([2], tf.float64 if odd else tf.float32), name="a"),
        "op": lambda: hvd.allreduce(tf.ones([2]), op=hvd.Min if odd else hvd.Max, name="a"),
        "root": lambda: hvd.broadcast(tf.ones([2]), int(odd), name="a"),
        "factor": lambda: hvd.allreduce(tf.ones([2]), prescale_factor=1.0 + odd, name="a"),
        "columns": lambda: hvd.allgather(tf.ones([2, 2 + odd]), name="a"),
        "group": lambda: hvd.grouped_allreduce([tf.ones(2)] * (1 + odd), name="a"),
    }
    for what, function in cases.items():
        with pytest.raises(errors.FailedPreconditionError, match="Horovod"):
            run(mode, function)
            pytest.fail(what)
        still_works()


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_is_wrong(mode: str) -> None:
    """Its own call fails at once, and the other rank's does too instead of waiting."""
    wrong: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (
            lambda: hvd.alltoall(tf.range(4), [1, 1, 2], name="b"),
            lambda: hvd.alltoall(tf.range(4), [1, 3], name="b"),
        ),
        (
            lambda: hvd.alltoall(tf.range(4), [-1, 2], name="b"),
            lambda: hvd.alltoall(tf.range(4), [1, 3], name="b"),
        ),
        (
            lambda: hvd.alltoall(tf.range(4), [3, 2], name="b"),
            lambda: hvd.alltoall(tf.range(4), [1, 3], name="b"),
        ),
        (
            lambda: hvd.alltoall(tf.range(4), [object()], name="b"),
            lambda: hvd.alltoall(tf.range(4), [1, 3], name="b"),
        ),
        (
            lambda: hvd.alltoall(tf.range(3), name="b"),
            lambda: hvd.alltoall(tf.range(4), name="b"),
        ),
        (
            lambda: hvd.allgather(tf.constant(1.0), name="b"),
            lambda: hvd.allgather(tf.ones([1]), name="b"),
        ),
        (
            lambda: hvd.reducescatter(tf.constant(1.0), name="b"),
            lambda: hvd.reducescatter(tf.ones([1]), name="b"),
        ),
        (
            lambda: hvd.allreduce(tf.constant("text"), name="b"),
            lambda: hvd.allreduce(tf.ones([1]), name="b"),
        ),
        (
            lambda: hvd.allreduce(object(), name="b"),
            lambda: hvd.allreduce(tf.ones([1]), name="b"),
        ),
        (
            lambda: hvd.broadcast(tf.ones([1]), 2, name="b"),
            lambda: hvd.broadcast(tf.ones([1]), 0, name="b"),
        ),
    ]
    for mistake, right in wrong:
        if hvd.rank() == 0:
            with pytest.raises((errors.InvalidArgumentError, ValueError, TypeError)):
                run(mode, mistake)
        else:
            with pytest.raises(errors.FailedPreconditionError, match="rank 0"):
                run(mode, right)
        still_works()


@pytest.mark.np(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_option_of_one_rank_is_wrong(mode: str) -> None:
    """What is noticed before there is a tensor makes the other rank's call fail all the same."""
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
    rows = tf.range(4)
    mistakes: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (hvd.allreduce, (rows,), {"op": 77}),
        (hvd.allreduce, (rows,), {"op": hvd.Sum, "average": True}),
        (hvd.allreduce, (rows,), {"prescale_factor": "half"}),
        (hvd.allreduce, (rows,), {"compression": None}),
        (hvd.allreduce, (rows,), {"compression": Broken}),
        (hvd.allreduce, (rows,), {"device_dense": "nowhere"}),
        (hvd.allreduce, (slices,), {"op": hvd.Max}),
        (hvd.allreduce, (slices,), {"device_sparse": "nowhere"}),
        (hvd.grouped_allreduce, ([rows],), {"tensors": 5}),
        (hvd.grouped_allreduce, ([rows],), {"tensors": rows}),
        (hvd.grouped_allgather, ([rows],), {"tensors": 5}),
        (hvd.reducescatter, (rows,), {"op": hvd.Max}),
        (hvd.grouped_reducescatter, ([rows],), {"op": hvd.Max}),
        (hvd.broadcast, (rows, 0), {"root_rank": "first"}),
        (hvd.broadcast, (rows, 0), {"root_rank": 1 << 40}),
        (hvd.alltoall, (rows, [1, 3]), {"splits": object()}),
        (hvd.alltoall, (rows, [1, 3]), {"splits": [1.0, 3.0]}),
        (hvd.alltoall, (rows, [1, 3]), {"splits": "ab"}),
        (hvd.alltoall, (rows, [1, 3]), {"splits": []}),
        (hvd.alltoall, (rows, [1, 3]), {"splits": [(1 << 32) + 1, 3]}),
    ]
    for function, arguments, mistake in mistakes:
        right = dict(zip(list(inspect.signature(function).parameters), arguments, strict=False))
        if hvd.rank() == 0:
            with pytest.raises(Exception) as caught:
                run(mode, lambda f=function, a=right | mistake: f(**a))
            assert not isinstance(caught.value, errors.UnknownError), mistake
        else:
            with pytest.raises(errors.FailedPreconditionError, match="rank 0"):
                run(mode, lambda f=function, a=right: f(**a))
                pytest.fail(str(mistake))
        still_works()


class Broken(hvd.compression.Compressor):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        raise RuntimeError("the way there")

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class BrokenBack(hvd.compression.Compressor):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        raise ValueError("the way back")


@pytest.mark.np(2)
def test_a_call_that_was_made_is_not_taken_back() -> None:
    """If a rank's own decompression fails, the others have their result, and the next call."""
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="the way back"):
            hvd.allreduce(tf.ones([2]), compression=BrokenBack)
    else:
        hvd.allreduce(tf.ones([2]))
    assert hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist() == [2.0, 2.0]
    still_works()


@pytest.mark.np(3)
@pytest.mark.parametrize("mode", MODES)
def test_outsiders_and_removed_sets(mode: str) -> None:
    pair = hvd.add_process_set([0, 2])
    call = lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=pair)  # noqa: E731
    if hvd.rank() == 1:
        with pytest.raises(errors.InvalidArgumentError, match="no member"):
            run(mode, call)
    else:
        assert run(mode, call).numpy().tolist() == [2.0, 2.0]
    traced = tf.function(call)
    traced.get_concrete_function()
    size = tf.function(lambda number=pair.process_set_id: hvd.size_op(number))
    assert size().numpy() == 2
    assert hvd.remove_process_set(pair)
    with pytest.raises(errors.InvalidArgumentError, match="no process set"):
        size()
    with pytest.raises(ValueError, match="not registered"):
        run(mode, call)
    with pytest.raises(errors.InvalidArgumentError, match="no process set"):
        traced()
    with pytest.raises(TypeError, match="ProcessSet"):
        hvd.allreduce(tf.ones(1), process_set=1)
    still_works()


@pytest.mark.np(3)
def test_a_graph_knows_no_set_of_a_later_run() -> None:
    """Its number means no other ranks after another init()."""
    pair = hvd.add_process_set([0, 1])
    traced = tf.function(lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=pair))
    traced.get_concrete_function()
    hvd.shutdown()
    hvd.init()
    others = hvd.add_process_set([1, 2])
    with pytest.raises(errors.InvalidArgumentError, match="no process set"):
        traced()
    assert hvd.remove_process_set(others)
    still_works()


@pytest.mark.np(4)
def test_sets_that_overlap() -> None:
    """Case C26: averages divide by the set's size; same names in disjoint sets don't meet."""
    sets = {ranks: hvd.add_process_set(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2, 3))}
    own = {ranks: s for ranks, s in sets.items() if hvd.rank() in ranks}

    @tf.function
    def step(x: tf.Tensor) -> Any:
        return [hvd.allreduce(x, process_set=s, name="same") for s in own.values()]

    for ranks, mean in zip(own, step(tf.constant(float(hvd.rank()))), strict=True):
        assert mean.numpy() == pytest.approx(sum(ranks) / len(ranks))
    for ranks, process_set in own.items():
        rows = hvd.allgather(tf.fill([hvd.rank(), 1], 1.0), process_set=process_set)
        assert rows.shape == (sum(ranks), 1)
    hvd.barrier()
    for process_set in sets.values():
        assert hvd.remove_process_set(process_set)


@pytest.mark.np(3)
@pytest.mark.parametrize("mode", MODES)
def test_join(mode: str) -> None:
    """Case C24: ranks with 5, 3 and 7 steps; the joined add nothing, the mean divides by all."""

    def step(x: tf.Tensor) -> Any:
        half = hvd.allreduce(tf.cast(x, tf.float16), op=hvd.Sum, name="half")
        return hvd.allreduce(x, name="mean"), half, hvd.grouped_allreduce([x, x], name="group")

    step = tf.function(step) if mode == "traced" else step
    last = tf.function(hvd.join) if mode == "traced" else hvd.join
    for _ in range(3):
        steps = [5, 3, 7]
        for k in range(steps[hvd.rank()]):
            alive = sum(k < count for count in steps)
            mean, half, group = step(tf.ones([4]))
            assert half.numpy().tolist() == [alive] * 4
            for value in (mean, *group):
                assert value.numpy() == pytest.approx([alive / 3] * 4)
        assert last().numpy() == 2
    still_works()


@pytest.mark.np(2)
def test_the_engine_is_gone() -> None:
    """Before init() and after shutdown() a call says so, and graphs outlive the engine."""

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)

    assert step(tf.ones([1])).numpy() == 2.0
    hvd.shutdown()
    try:
        for call in (step, hvd.allreduce):
            with pytest.raises(errors.FailedPreconditionError, match="not initialized"):
                call(tf.ones([1]))
        with pytest.raises(errors.FailedPreconditionError, match="not initialized"):
            hvd.rank_op()
        assert hvd.process_set_included_op().numpy() == -1
    finally:
        hvd.init()
    assert step(tf.ones([1])).numpy() == 2.0
    still_works()


@pytest.mark.np(3, env={})
def test_a_rank_leaves() -> None:
    """Case C52 (g): whoever needs it gets an error that names it, also in a graph."""
    if hvd.rank() == 1:
        hvd.allreduce(tf.ones([1]), name="all are here")
        hvd.shutdown()
        return

    @tf.function
    def step(x: tf.Tensor) -> Any:
        return hvd.allreduce(x), hvd.allgather(x)

    hvd.allreduce(tf.ones([1]), name="all are here")
    for call in (step, hvd.allreduce):
        with pytest.raises(errors.UnknownError, match="Horovod") as caught:
            call(tf.ones([1]))
        assert "rank 1" in str(caught.value)
