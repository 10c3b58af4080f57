"""What traced functions do with collectives: names, order, what must run, and how often."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common import basics

MANY = Path(__file__).with_name("many.py")


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_many_calls_in_any_order(threads: int) -> None:
    """200 calls without an order, made in another one on each rank, hold no thread."""
    launcher = [sys.executable, "-m", "horovod.runner", "-np", "2", sys.executable]
    done = subprocess.run(
        [*launcher, str(MANY), str(threads)], capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stdout + done.stderr


def calls_of(function: Any, *arguments: Any) -> list[str]:
    """The names of the collectives in a trace, those of functions it calls included."""
    graph = function.get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return sorted(
        node.attr["tensor_name"].s.decode() for node in nodes if "tensor_name" in node.attr
    )


@pytest.mark.np(2)
def test_names_are_the_same_in_every_trace() -> None:
    """Retracing on one rank only is harmless, and scopes play no part (case C67)."""

    @tf.function
    def step(x: tf.Tensor) -> Any:
        with tf.name_scope("scope"):
            first = hvd.allreduce(x, op=hvd.Sum)
        return first, hvd.allgather(x), hvd.allreduce(x, name="mine")

    expected = ["allgather.step.1", "allreduce.mine", "allreduce.step.0"]
    for shape in ([2], [3], [4]) if hvd.rank() == 0 else ([2],):
        assert calls_of(step, tf.zeros(shape)) == expected
    assert step(tf.ones([2]))[0].numpy().tolist() == [2.0, 2.0]
    step.get_concrete_function(tf.TensorSpec([2], tf.float64))
    assert step(tf.ones([2]))[2].numpy().tolist() == [1.0, 1.0]


@pytest.mark.np(3)
def test_calls_of_a_set_are_counted_apart() -> None:
    """A rank outside of a set doesn't make its calls, and still names all others as the members."""
    pair = hvd.add_process_set([0, 1])
    w = tf.Variable(1.0)

    @tf.function
    def step(x: tf.Tensor) -> Any:
        if pair.included():
            x = hvd.allreduce(x, op=hvd.Sum, process_set=pair)
        with tf.GradientTape(persistent=True) as tape:
            y = w * x
        reduced = [
            hvd.DistributedGradientTape(tape, process_set=one).gradient(y, [w])[0]
            for one in (pair, hvd.global_process_set)
        ]
        return [*reduced, hvd.allreduce(x, op=hvd.Sum)]

    own, mean, total = step(tf.constant(1.0 + hvd.rank()))
    assert own.numpy() == 3.0  # of both members, whose sum is 3.0, and of the third rank
    assert (mean.numpy(), total.numpy()) == (3.0, 9.0)
    assert hvd.remove_process_set(pair)


@pytest.mark.np(2)
def test_branches_and_loops_count_with_their_function() -> None:
    @tf.function
    def step(x: tf.Tensor) -> Any:
        y = hvd.allreduce(x, op=hvd.Sum)
        if tf.reduce_sum(y) > 3.0:  # noqa: SIM108  equal on all ranks
            y = hvd.allreduce(y * 2.0)
        else:
            y = hvd.allreduce(y * 3.0)
        for i in tf.range(4):
            y = hvd.allreduce(y + tf.cast(i, tf.float32), op=hvd.Sum)
        return y

    names = calls_of(step, tf.zeros([1]))
    assert len(set(names)) == 4 and all(name.startswith("allreduce.step.") for name in names)
    value = 2.0 * 3.0
    for i in range(4):
        value = 2 * (value + i)
    assert step(tf.ones([1])).numpy().tolist() == [value]
    value = 4.0 * 2.0
    for i in range(4):
        value = 2 * (value + i)
    assert step(tf.fill([1], 2.0)).numpy().tolist() == [value]


@pytest.mark.np(2)
def test_iterations_at_once() -> None:
    """Iterations that don't depend on each other may overlap; each is a call of its own."""

    @tf.function
    def step(n: tf.Tensor) -> tf.Tensor:
        results = tf.TensorArray(tf.float32, n)
        for i in tf.range(n):
            value = tf.cast(i * (hvd.rank() + 1), tf.float32)
            results = results.write(i, hvd.allreduce(value, op=hvd.Sum))
        return results.stack()

    for _ in range(3):
        assert step(tf.constant(30)).numpy().tolist() == [3.0 * i for i in range(30)]


@pytest.mark.np(2)
def test_a_function_called_twice_in_a_step() -> None:
    """Its calls have the same names, so the two take their order from the program."""

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x: tf.Tensor) -> Any:
        return inner(x), inner(x * 10.0), hvd.allreduce(x, op=hvd.Sum)

    for _ in range(20):
        one, ten, own = outer(tf.constant(1.0 + hvd.rank()))
        assert (one.numpy(), ten.numpy(), own.numpy()) == (3.0, 30.0, 3.0)


class Model:
    """One of several with a method of one name; its variable is its own."""

    def __init__(self) -> None:
        self.weight = tf.Variable(0.0)

    @tf.function
    def step(self, x: tf.Tensor, late: bool) -> tf.Tensor:
        if late:
            for _ in range(20):
                x = tf.reduce_sum(tf.linalg.matmul(tf.fill([200, 200], x), tf.eye(200))) / 40000.0
        self.weight.assign(hvd.allreduce(x, op=hvd.Sum))
        return self.weight.read_value()


@pytest.mark.np(2)
def test_functions_of_one_name_in_one_step() -> None:
    """They share no variable, and each is late on another rank: still none meets the other."""
    one, other = Model(), Model()

    @tf.function
    def both(x: tf.Tensor) -> Any:
        return one.step(x, hvd.rank() == 1), other.step(-x, hvd.rank() == 0)

    for k in range(1, 30):
        mine, its = both(tf.constant(float(k)))
        assert mine.numpy() == pytest.approx(2.0 * k, rel=1e-3)
        assert its.numpy() == pytest.approx(-2.0 * k, rel=1e-3)


@pytest.mark.np(2)
def test_nothing_is_folded_merged_or_dropped() -> None:
    counts = []

    @tf.function
    def step() -> Any:
        same = [hvd.allreduce(tf.ones([3]), op=hvd.Sum) for _ in range(2)]
        hvd.allreduce(tf.zeros([2]))  # nobody uses it
        hvd.broadcast(tf.zeros([2]), 0, name="unused")
        return same

    before = basics.engine().counters()["calls"]
    for _ in range(5):
        assert all(value.numpy().tolist() == [2.0] * 3 for value in step())
        after = basics.engine().counters()["calls"]
        counts.append(after - before)
        before = after
    hvd.barrier()
    assert counts == [4] * 5


@pytest.mark.np(2)
def test_calls_of_one_step_are_under_way_together() -> None:
    """Being stateful doesn't put them in a row: the peer sees all names before it makes a call."""
    names = [f"together{i}" for i in range(16)]

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return [hvd.allreduce(x, name=name) for name in names]

    expected = {f"allreduce.{name}" for name in names}
    engine = basics.engine()
    step.get_concrete_function(tf.zeros([2]))
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.allreduce(tf.zeros(1), name="all of them are under way")
        step(tf.zeros([2]))
        return
    thread = threading.Thread(target=step, args=(tf.zeros([2]),), daemon=True)
    thread.start()
    deadline = threading.Event()
    for _ in range(400):
        if expected <= set(engine.pending()):
            break
        deadline.wait(0.05)
    assert expected <= set(engine.pending())
    hvd.allreduce(tf.zeros(1), name="all of them are under way")
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.np(2)
def test_one_name_twice_in_a_step() -> None:
    """Calls of one name come in the order of the program, also from within a branch."""

    @tf.function
    def step(x: tf.Tensor) -> Any:
        calls = [hvd.allreduce(x + float(i), name="twice") for i in range(50)]
        if x[0] > 0.0:
            last = hvd.allreduce(x + 50.0, name="twice")
        else:
            last = hvd.allreduce(x, name="twice")
        return [*calls, last]

    for _ in range(5):
        values = step(tf.ones([1]))
        assert [float(value[0]) for value in values] == [1.0 + i for i in range(51)]
    assert hvd.allreduce(tf.ones([1]), name="twice").numpy() == 1.0


@pytest.mark.np(2)
def test_threads_take_turns() -> None:
    """Eager calls of several threads share a name; they wait for each other, none is lost."""
    results: list[float] = []

    def work() -> None:
        for _ in range(25):
            results.append(float(hvd.allreduce(tf.ones([2]), op=hvd.Sum)[0]))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [2.0] * 100


@pytest.mark.np(2)
def test_graphs_of_tensorflow_1() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2])
        with tf.name_scope("scope"):
            named = hvd.allreduce(x, op=hvd.Sum, name="a")
            bare = hvd.allreduce(x, op=hvd.Sum, name="a", ignore_name_scope=True)
        other = hvd.allreduce(x)
        keys = [t.op.get_attr("tensor_name").decode() for t in (named, bare, other)]
        assert keys == ["allreduce.scope/a", "allreduce.a", "allreduce.graph.0"]
        gradient = tf.compat.v1.gradients(other, x)[0]
        with tf.compat.v1.Session() as session:
            values = session.run([named, bare, other, gradient], {x: [1.0, hvd.rank()]})
    assert [v.tolist() for v in values] == [[2.0, 1.0], [2.0, 1.0], [1.0, 0.5], [1.0, 1.0]]


@pytest.mark.np(2)
def test_join_comes_after_what_is_before_it() -> None:
    """Else a rank would have joined before its own calls, which then reduce without the others."""

    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        before = [hvd.allreduce(x + float(i), op=hvd.Sum) for i in range(20)]
        last = hvd.join()
        return tf.add_n(before), last, hvd.allreduce(x, op=hvd.Sum)

    for _ in range(30):
        before, last, after = step(tf.ones([]))
        assert before.numpy() == 2 * sum(range(1, 21))
        assert last.numpy() in (0, 1)
        assert after.numpy() == 2.0


@pytest.mark.np(2)
def test_vectorized_calls_are_refused() -> None:
    """While they are traced; the loop says the same, and works."""
    rows = tf.reshape(tf.range(6.0), [3, 2])
    reduce = lambda row: hvd.allreduce(row, op=hvd.Sum)  # noqa: E731
    with pytest.raises(ValueError, match=r"tf\.map_fn"):
        tf.function(lambda: tf.vectorized_map(reduce, rows))()
    assert tf.reduce_all(tf.function(lambda: tf.map_fn(reduce, rows))() == 2 * rows)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(rows)
        total = reduce(rows[0])
    with pytest.raises(ValueError, match="experimental_use_pfor"):
        tape.jacobian(total, rows)
    slopes = tape.jacobian(total, rows, experimental_use_pfor=False)
    assert slopes[:, 0].numpy().tolist() == [[2.0, 0.0], [0.0, 2.0]]
