"""Bytes as tensors, and small plain values gathered in one call; must not know what they mean."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch

from horovod.common import ops
from horovod.common.ops import Call, synchronize
from horovod.common.process_sets import ProcessSet
from horovod.torch.ops import submit
from horovod.torch.views import TO_ENGINE

_NOTHING = torch.empty(0, dtype=torch.uint8)  # frombuffer refuses an empty buffer


def gather_plain(what: str, make: Callable[[], Any], process_set: ProcessSet) -> list[Any]:
    """The members' values in the order of their ranks, equal on all. Blocks until all have called.

    Args:
        what: who asks; calls match in order among those of one asker.
        make: gives None, numbers, text, lists or dicts with text as keys. What it raises, the other
            members raise too, as a HorovodInternalError.
        process_set: who takes part.
    """
    with Call(ops.ALLGATHER, ops.next_name(process_set, what), process_set) as call:
        line = json.dumps(make()).encode() + b"\n"
        handle = submit(call, (as_tensor(line),), TO_ENGINE)
    return [json.loads(line) for line in as_bytes(synchronize(handle)).splitlines()]


def as_tensor(data: bytes) -> torch.Tensor:
    """A 1-d uint8 tensor with a copy of the bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING


def as_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a contiguous uint8 tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
