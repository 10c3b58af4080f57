"""Sends Python objects between ranks as pickled bytes; must not know any framework.

An object is pickled into a stream, which travels in chunks and is unpickled as it comes: beside the
object itself and the chunk, nobody needs memory for it. A chunk is two broadcasts: how many bytes
it has and whether another one follows, then the bytes.

A failure on one rank is agreed upon before anybody returns. That rank takes part in the next call
by rejecting it, so every member raises there, and the call after it finds them all at the same
place.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from horovod.common import basics, ops
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import Call, DType, Op, ReduceOp, View
from horovod.common.process_sets import ProcessSet

_CHUNK_BYTES = 4 << 20
_TOGETHER_BYTES = 16 << 20  # what an allgather takes at once; more goes rank by rank, in chunks
_HEADER = struct.Struct("<qq")  # bytes of the chunk; whether another one follows


def broadcast_object(obj: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    """Gives every member the root's object; the root gets back what it passed.

    Blocks until every member has called it. Needs some 10 MiB beside the object, and what pickling
    and unpickling copy: nothing of ``bytes`` and NumPy arrays, one tensor at a time of torch's.

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
    talk = Talk(f"broadcast.{name}", process_set)
    if basics.rank() == root_rank:
        talk.dump(obj, lambda data, more: talk.send(name, data, more))
    else:
        obj = talk.load(talk.receive(name, root_rank))
    talk.agree()
    return obj


def allgather_object(obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Gives every member the objects of all, in the order of their ranks.

    Blocks until every member has called it. Needs the memory of this rank's pickled object and
    some 30 MiB beside the objects, and what pickling and unpickling copy.

    Args:
        obj: anything that cloudpickle can send.
        name: matches the call with those of the other members; without one, calls match in order.
        process_set: who takes part.

    Raises:
        HorovodInternalError: on every member: pickling or unpickling failed on one, or one is lost.
        ValueError: this rank isn't in the set.
    """
    basics.engine()
    name = name or ops.next_name(process_set, "object")
    talk = Talk(f"allgather.{name}", process_set)
    mine: list[bytearray] = []
    talk.dump(obj, lambda data, more: mine.append(data))
    size = bytearray(sum(map(len, mine)).to_bytes(8, "little"))
    members = ops.ranks(process_set)
    sizes = talk.allgather(f"{name}.sz", size, 8 * len(members)).cast("q").tolist()
    if sum(sizes) <= _TOGETHER_BYTES:
        together = talk.allgather(f"{name}.t", bytearray().join(mine), sum(sizes))
        ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        objects = [talk.load(iter([together[start:end]])) for start, end in ends]
    else:
        objects = [talk.load(talk.exchange(f"{name}.{root}", root, mine)) for root in members]
    talk.agree()
    return objects


class Talk:
    """The calls that all members make together, in order, until one of them fails.

    What fails here between two calls makes the next one raise, on all members.

    Args:
        what: the name of it all, for errors and for the agreement at its end.
        process_set: who takes part.
    """

    def __init__(self, what: str, process_set: ProcessSet) -> None:
        self._what = what
        self._set = process_set
        self._error: BaseException | None = None  # what the others haven't been told yet
        self._over = False  # a call has failed, so everybody knows
        self._scratch = bytearray()

    def fail(self, verb: str, error: BaseException) -> None:
        """Notes what the next call shall raise: on this rank `error` itself unless it is ours."""
        if self._over:
            raise error
        if isinstance(error, Exception):
            rank = basics.rank()
            text = f"rank {rank} could not {verb}: {type(error).__name__}: {error}"
            cause, error = error, HorovodInternalError(text, rank=rank, op=self._what)
            error.__cause__ = cause
        self._error = self._error or error

    def agree(self) -> None:
        """Returns if all members have come here without a failure, raises on all otherwise."""
        byte = bytearray(1)
        self._call(ops.ALLREDUCE, f"{self._what}.ok", lambda: (byte, byte), reduce_op=ReduceOp.Max)

    def allgather(self, name: str, data: bytearray, total: int) -> memoryview:
        """The bytes of all members in the order of their ranks, `total` of them."""
        gathered = self._call(ops.ALLGATHER, name, lambda: (data, bytearray(total)))
        return memoryview(gathered)

    def send(self, name: str, data: bytearray, more: bool) -> None:
        """Gives the other members one chunk of this rank's."""
        root, header = basics.rank(), bytearray(_HEADER.pack(len(data), more))
        self._call(ops.BROADCAST, f"{name}.sz", lambda: (header, header), root=root)
        self._call(ops.BROADCAST, f"{name}.t", lambda: (data, data), root=root)

    def receive(self, name: str, root: int) -> Iterator[memoryview]:
        """The chunks that the root sends; each is valid until the next is asked for."""
        header = bytearray(_HEADER.size)
        more = True
        while more:
            self._call(ops.BROADCAST, f"{name}.sz", lambda: (header, header), root=root)
            size, more = _HEADER.unpack(header)
            self._call(ops.BROADCAST, f"{name}.t", lambda: self._space(size), root=root)  # noqa: B023
            yield memoryview(self._scratch)

    def exchange(self, name: str, root: int, mine: list[bytearray]) -> Iterator[memoryview]:
        """The chunks of one member; they are `mine` if that is this rank, and go to the others."""
        if root != basics.rank():
            yield from self.receive(name, root)
            return
        for left in range(len(mine) - 1, -1, -1):
            self.send(name, mine[0], left > 0)
            yield memoryview(mine.pop(0))

    def dump(self, obj: Any, send: Callable[[bytearray, bool], None]) -> None:
        """Pickles into `send`, called with one chunk at a time and whether another one follows."""
        chunks = _Chunks(send)
        try:
            cloudpickle.Pickler(chunks).dump(obj)
        except BaseException as error:  # whatever users' own __reduce__ raises
            self.fail("pickle the object", error)
        chunks.close()

    def load(self, chunks: Iterator[memoryview]) -> Any:
        """Unpickles from chunks, all of which are taken also if that fails."""
        obj = None
        try:
            obj = pickle.load(_Reader(chunks))
        except BaseException as error:  # whatever users' own __setstate__ raises
            self.fail("unpickle the object", error)
        for _ in chunks:
            pass
        return obj

    def _space(self, size: int) -> tuple[bytearray, bytearray]:
        if len(self._scratch) != size:
            self._scratch = bytearray(size)
        return self._scratch, self._scratch

    def _call(
        self,
        op: Op,
        name: str,
        make: Callable[[], tuple[bytearray, bytearray]],
        **options: Any,
    ) -> bytearray:
        """Makes one call on the bytes of an input and an output; gives the output."""
        try:
            with Call(op, name, self._set) as call:
                if self._error is not None:
                    raise self._error
                source, target = make()
                view = View(_address(source), _address(target), DType.uint8, (len(source),))
                keep = (source, target)
                handle = call.submit([view], lambda result: None, keep=keep, **options)
            ops.synchronize(handle)
        except BaseException:
            self._over = True
            raise
        return target


def agree(what: str, verb: str, error: Exception | None, process_set: ProcessSet) -> None:
    """Returns if no member has an error; else raises on all, saying which rank could not `verb`."""
    talk = Talk(what, process_set)
    if error is not None:
        talk.fail(verb, error)
    talk.agree()


def _address(buffer: bytearray) -> int:
    """Where the bytes lie; valid while someone holds the buffer and leaves its size alone."""
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


class _Chunks:
    """A file that cuts what is written into it into chunks."""

    def __init__(self, send: Callable[[bytearray, bool], None]) -> None:
        self._send = send
        self._pending = bytearray()

    def write(self, data: Any) -> int:
        rest = pickle.PickleBuffer(data).raw()
        size = len(rest)
        while (room := _CHUNK_BYTES - len(self._pending)) < len(rest):
            self._pending += rest[:room]
            self._flush(more=True)
            rest = rest[room:]
        self._pending += rest
        return size

    def close(self) -> None:
        self._flush(more=False)

    def _flush(self, more: bool) -> None:
        full, self._pending = self._pending, bytearray()
        self._send(full, more)


class _Reader(io.RawIOBase):
    """A file that is read from chunks, each of which is used up before the next is asked for."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        while room:
            if not self._rest:
                try:
                    self._rest = next(self._chunks)
                except StopIteration:
                    break
            n = min(len(room), len(self._rest))
            room[:n], room = self._rest[:n], room[n:]
            self._rest = self._rest[n:]
        return memoryview(buffer).nbytes - len(room)
