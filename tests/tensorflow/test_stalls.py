"""Traced functions that differ: all are told what is waited for, and where it was made."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

LIMITS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2",
}


def lines_of(function: Any) -> dict[str, str]:
    """The places of a function's lines that end in a remark, by remark."""
    lines, first = inspect.getsourcelines(function)
    return {
        line.rpartition("# ")[2].strip(): f"{__file__}:{first + i}"
        for i, line in enumerate(lines)
        if "# " in line
    }


@pytest.mark.np(2, env=LIMITS)
def test_different_graphs_are_told_with_their_lines() -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        y = hvd.allreduce(x, op=hvd.Sum)  # both
        if hvd.rank() == 0:
            return hvd.allreduce(y, name="extra")  # rank 0
        return hvd.allgather(y)  # rank 1

    places = lines_of(test_different_graphs_are_told_with_their_lines)
    with pytest.raises(tf.errors.UnknownError, match="Horovod") as caught:
        step(tf.ones([2]))
    text = str(caught.value)
    mine, other = ("rank 0", "rank 1") if hvd.rank() == 0 else ("rank 1", "rank 0")
    assert 'allreduce "extra"' in text and 'allgather "step.1"' in text, text
    assert places[mine] in text and places[other] in text, text
