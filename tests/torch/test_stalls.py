"""A rank that makes one call more than the others: what everybody is told, with files and lines."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import StallError


def next_line() -> str:
    """The place of the line below its caller, as reports name it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + 1}"


class Report(logging.Handler):
    """The first record with certain words; that it has come is told by a fifo."""

    def __init__(self, words: str, seen: Path) -> None:
        super().__init__()
        self.words = words
        self.seen = seen
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.text and self.words in record.getMessage():
            self.text = record.getMessage()
            self.seen.write_text("")


LIMITS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
}


def test_calls_that_drift_apart_are_told_with_their_lines(worlds: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "seen")
    worlds.run(2, __file__, "drift_apart", {"seen": tmp_path / "seen"}, env=LIMITS)


def drift_apart(seen: Path) -> None:
    """Rank 1 waits for rank 0 by a fifo, since a collective would be what it last announced."""
    me = hvd.rank()
    report = Report('calls: allreduce "w', seen)
    if me == 0:
        logging.getLogger("horovod").addHandler(report)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), named_parameters=[("weight", weight)]
    )
    hvd.barrier()
    for _ in range(3):
        loop = next_line()
        hvd.allreduce(torch.ones(2))

    # A hook submits the gradient; the user's line is that of backward().
    if me == 1:
        seen.read_text()
    backward = next_line()
    weight.sum().backward()
    optimizer.step()
    if me == 0:
        assert "Missing: rank 1 " in report.text
        last = f'which last announced allreduce "noname.3" at {loop} '
        waiting = f'Waiting calls: allreduce "weight" (rank 0 at {backward})'
        assert last in report.text and waiting in report.text, report.text

    place = ""
    with pytest.raises(StallError) as caught:
        if me == 0:
            place = next_line()
            hvd.allreduce(torch.ones(2))
        seen.read_text()
        hvd.allreduce(torch.ones(2), name="next")
    if me == 0:
        seen.write_text("")
    text = str(caught.value)
    assert f'allreduce "noname.4" (rank 0 at {place}' in text and "Missing: rank 1 " in text, text
    assert f'weight" at {backward} ' in text, text  # which rank 1 announced last
    assert "Calls without a name match by their number" in text
