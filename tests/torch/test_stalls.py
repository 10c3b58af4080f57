"""A rank that makes one call more than the others: what everybody is told, with files and lines."""

from __future__ import annotations

import inspect
import logging
import time

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import StallError


def next_line() -> str:
    """The place of the line below its caller, as reports name it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + 1}"


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


LIMITS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
}


@pytest.mark.np(2, env=LIMITS)
def test_calls_that_drift_apart_are_told_with_their_lines() -> None:
    me = hvd.rank()
    records = Records()
    logging.getLogger("horovod").addHandler(records)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), named_parameters=[("weight", weight)]
    )
    hvd.barrier()
    for _ in range(3):
        loop = next_line()
        hvd.allreduce(torch.ones(2))

    # A hook submits the gradient; the user's line is that of backward().
    if me == 0:
        backward = next_line()
        weight.sum().backward()
        deadline = time.monotonic() + 1.9
        while not (reports := [text for text in records.texts if 'calls: allreduce "w' in text]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        report = reports[0]
        assert "Missing: rank 1 " in report
        assert f'which last announced allreduce "noname.3" at {loop} ' in report, report
        assert f'Waiting calls: allreduce "weight" (rank 0 at {backward})' in report, report
    else:
        time.sleep(2)
        weight.sum().backward()
    optimizer.step()

    place = ""
    with pytest.raises(StallError) as caught:
        if me == 0:
            place = next_line()
            hvd.allreduce(torch.ones(2))
        time.sleep(4)
        hvd.allreduce(torch.ones(2), name="next")
    text = str(caught.value)
    assert f'allreduce "noname.4" (rank 0 at {place}' in text and "Missing: rank 1 " in text, text
    assert 'which last announced allreduce "weight" at ' in text, text
    assert "Calls without a name match by their number" in text
