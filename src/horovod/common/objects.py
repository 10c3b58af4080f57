"""Sends Python objects between ranks as pickled bytes; must not know any framework.

Sizes travel first, as 64-bit numbers. A failure on one rank is agreed upon before anybody returns:
every member raises it, and the next collective finds them all at the same place.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle

from horovod.common import basics, ops
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import Call, DType, ReduceOp, View
from horovod.common.process_sets import ProcessSet

_FAILED = -1  # instead of a size: this rank couldn't pickle
_REASON_BYTES = 1024


def broadcast_object(obj: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    """Gives every member the root's object; the root gets back what it passed.

    Blocks until every member has called it. Takes the memory of the pickled object once.

    Args:
        obj: anything that cloudpickle can send; counts on the root only.
        root_rank: global rank of the member whose object counts.
        name: matches the call with those of the other members; without one, calls match in order.
        process_set: who takes part.

    Raises:
        HorovodInternalError: on every member: pickling or unpickling failed on one, or one is lost.
        ValueError: the root or this rank isn't in the set.
    """
    basics.engine()  # without init() that is the error, with and without a name
    name = name or ops.next_name(process_set, "object")
    is_root = basics.rank() == root_rank
    data, error = _dump(obj) if is_root else (b"", None)
    header = _broadcast(f"{name}.sz", lambda: bytearray(_size(data, error)), root_rank, process_set)
    (size,) = _sizes(header)
    if size == _FAILED:
        _raise_everywhere(f"broadcast.{name}", "pickle", root_rank, error, process_set)
    received = _broadcast(
        f"{name}.t", lambda: data if is_root else bytearray(size), root_rank, process_set
    )
    if not is_root:
        obj, error = _load(memoryview(received))
    agree(f"broadcast.{name}", "unpickle", error, process_set)
    return obj


def allgather_object(obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Gives every member the objects of all, in the order of their ranks.

    Blocks until every member has called it. Takes the memory of all pickled objects once.

    Args:
        obj: anything that cloudpickle can send.
        name: matches the call with those of the other members; without one, calls match in order.
        process_set: who takes part.

    Raises:
        HorovodInternalError: on every member: pickling or unpickling failed on one, or one is lost.
        ValueError: this rank isn't in the set.
    """
    name = name or ops.next_name(process_set, "object")
    data, error = _dump(obj)
    count = ops.members(process_set)
    sizes = _sizes(_allgather(f"{name}.sz", _size(data, error), 8 * count, process_set))
    if _FAILED in sizes:
        failed = (process_set.ranks or [])[sizes.index(_FAILED)]
        _raise_everywhere(f"allgather.{name}", "pickle", failed, error, process_set)
    received = memoryview(_allgather(f"{name}.t", data, sum(sizes), process_set))
    objects = []
    for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        loaded, failure = _load(received[start:end])
        objects.append(loaded)
        error = error or failure
    agree(f"allgather.{name}", "unpickle", error, process_set)
    return objects


# Users' own __reduce__ and __setstate__ run here and may raise anything.


def _dump(obj: Any) -> tuple[bytes, Exception | None]:
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:
        return b"", error


def _load(data: memoryview) -> tuple[Any, Exception | None]:
    try:
        return pickle.loads(data), None
    except Exception as error:
        return None, error


def _size(data: bytes, error: Exception | None) -> bytes:
    return (_FAILED if error else len(data)).to_bytes(8, "little", signed=True)


def _sizes(header: bytes | bytearray) -> list[int]:
    return memoryview(header).cast("q").tolist()


def _address(buffer: bytes | bytearray) -> int:
    """Where the bytes lie; valid while someone holds the buffer."""
    if isinstance(buffer, bytes):
        return ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def _broadcast(
    name: str,
    make: Callable[[], bytes | bytearray],
    root_rank: int,
    process_set: ProcessSet,
) -> bytes | bytearray:
    """Fills what `make` gives with the root's bytes; no memory for it makes the others fail too."""
    with Call(ops.BROADCAST, name, process_set) as call:
        buffer = make()
        at = _address(buffer)
        view = View(at, at, DType.uint8, (len(buffer),))
        handle = call.submit([view], lambda result: buffer, keep=buffer, root=root_rank)
    filled: bytes | bytearray = ops.synchronize(handle)
    return filled


def _allgather(name: str, data: bytes, total: int, process_set: ProcessSet) -> bytearray:
    with Call(ops.ALLGATHER, name, process_set) as call:
        buffer = bytearray(total)
        view = View(_address(data), _address(buffer), DType.uint8, (len(data),))
        handle = call.submit([view], lambda result: buffer, keep=(data, buffer))
    gathered: bytearray = ops.synchronize(handle)
    return gathered


def agree(what: str, verb: str, error: Exception | None, process_set: ProcessSet) -> None:
    """Returns if no member has an error; else raises the one of the highest rank, on all."""
    buffer = bytearray((basics.rank() + 1 if error else 0).to_bytes(8, "little"))
    with Call(ops.ALLREDUCE, f"{what}.ok", process_set) as call:
        at = _address(buffer)
        view = View(at, at, DType.int64, (1,))
        handle = call.submit([view], lambda _: None, keep=buffer, reduce_op=ReduceOp.Max)
    ops.synchronize(handle)
    (failed,) = _sizes(buffer)
    if failed:
        _raise_everywhere(what, verb, failed - 1, error, process_set)


def _raise_everywhere(
    what: str, verb: str, failed: int, error: Exception | None, process_set: ProcessSet
) -> NoReturn:
    mine = basics.rank() == failed
    reason = f"{type(error).__name__}: {error}" if mine else ""
    padded = reason.encode("utf-8", "replace")[:_REASON_BYTES].ljust(_REASON_BYTES)
    told = _broadcast(f"{what}.error", lambda: bytearray(padded), failed, process_set)
    text = told.decode("utf-8", "replace").rstrip()
    raise HorovodInternalError(
        f"{what}: rank {failed} could not {verb} the object: {text}", rank=failed, op=what
    ) from (error if mine else None)
