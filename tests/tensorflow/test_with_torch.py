"""torch and TensorFlow in one process: one engine, one world, one set of process sets."""

from __future__ import annotations

import pytest
import tensorflow as tf
import torch

import horovod.tensorflow as hvd
import horovod.torch as torch_hvd

pytestmark = pytest.mark.flavour("torch_and_tensorflow")


@pytest.mark.np(2)
def test_one_world() -> None:
    assert hvd.global_process_set is torch_hvd.global_process_set
    assert (hvd.rank(), hvd.size()) == (torch_hvd.rank(), torch_hvd.size())
    assert hvd.rank_op().numpy() == torch_hvd.rank()
    alone = torch_hvd.add_process_set([1])
    assert hvd.process_set_included_op(alone.process_set_id).numpy() == (1 if hvd.rank() else -4)
    if hvd.rank() == 1:
        assert hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=alone).numpy().tolist() == [1, 1]
    assert hvd.remove_process_set(alone)


@pytest.mark.np(2)
def test_calls_at_once() -> None:
    """Calls of both are in flight together; ranks mix them in another order."""

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return [hvd.allreduce(x + float(i), op=hvd.Sum, name=f"tf{i}") for i in range(20)]

    def start() -> list[int]:
        values = [torch.full((100,), float(i)) for i in range(20)]
        return [
            torch_hvd.allreduce_async(v, op=torch_hvd.Sum, name=f"torch{i}")
            for i, v in enumerate(values)
        ]

    for _ in range(5):
        handles = start() if hvd.rank() == 0 else []
        outputs = step(tf.ones([50]))
        handles = handles or start()
        results = [torch_hvd.synchronize(handle) for handle in handles]
        for i in range(20):
            assert outputs[i].numpy().tolist() == [2.0 * (i + 1)] * 50
            assert results[i].tolist() == [2.0 * i] * 100


@pytest.mark.np(2)
def test_a_call_across_frameworks() -> None:
    """A name is a name, whichever framework makes the call."""
    if hvd.rank() == 0:
        assert hvd.allreduce(tf.ones([3]), op=hvd.Sum, name="across").numpy().tolist() == [2.0] * 3
    else:
        total = torch_hvd.allreduce(torch.ones(3), op=torch_hvd.Sum, name="across")
        assert total.tolist() == [2.0] * 3


@pytest.mark.np(2)
def test_join_of_both() -> None:
    """A join through one counts for the other, and numbers of unnamed calls start again."""
    for _ in range(hvd.rank() + 1):
        torch_hvd.allreduce(torch.ones(1))
    assert hvd.join().numpy() == 1
    assert torch_hvd.allreduce(torch.ones(1)).tolist() == [1.0]
    assert hvd.allreduce(tf.ones(1)).numpy().tolist() == [1.0]
