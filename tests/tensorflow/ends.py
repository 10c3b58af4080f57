"""One rank of a job in which rank 1 fails while the others are in a traced step.

Arguments: how rank 1 ends. Run by test_ends.
"""

from __future__ import annotations

import os
import signal
import sys

import tensorflow as tf

import horovod.tensorflow as hvd


@tf.function
def step(x: tf.Tensor) -> tf.Tensor:
    return hvd.allreduce(x, name="loss")


def main() -> None:
    hvd.init()
    for k in range(5):
        if k == 3 and hvd.rank() == 1:
            if sys.argv[1] == "raise":
                raise KeyError("broken")
            os.kill(os.getpid(), signal.SIGKILL)
        step(tf.ones([2]))


if __name__ == "__main__":
    main()
