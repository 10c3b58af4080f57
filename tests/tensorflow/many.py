"""One rank of a job that makes many collectives in one traced function, each rank in its own order.

Arguments: how many threads TensorFlow may run operators with. Run by test_graphs.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

CALLS = 200


def late(seconds: float, value: tf.Tensor) -> tf.Tensor:
    """The value, after a while in which a thread of TensorFlow's is busy."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    result = tf.numpy_function(wait, [value], value.dtype)
    result.set_shape(value.shape)
    return result


@tf.function
def step(x: tf.Tensor) -> list[tf.Tensor]:
    own = random.Random(hvd.rank())
    order = list(range(CALLS))
    own.shuffle(order)
    results: dict[int, tf.Tensor] = {}
    for i in order:
        value = x + float(i)
        if own.random() < 0.2:
            value = late(own.random() * 0.005, value)
        results[i] = hvd.allreduce(value, op=hvd.Sum, name=f"x{i}")
    return [results[i] for i in range(CALLS)]


def main() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(int(sys.argv[1]))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    ranks = hvd.size()
    for round_ in range(3):
        outputs = step(tf.fill([round_ * 300 + 1], float(hvd.rank())))
        for i, output in enumerate(outputs):
            expected = ranks * i + sum(range(ranks))
            np.testing.assert_array_equal(output.numpy(), np.full(round_ * 300 + 1, expected))
    hvd.shutdown()


if __name__ == "__main__":
    main()
