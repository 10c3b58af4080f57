"""The store's messages as bytes: a fixed schema with bounded lengths; knows no socket.

Request: ``kind u8, key length u8, 0 u16, size u32, timeout_ms u64, value length u64``, key, value.
Reply: ``status u8, 0 u8, 0 u16, count u32, generation u64, value length u64``, value.
All numbers are big-endian. A round's payloads travel as one value: each one's length (u32), then
it.
"""

from __future__ import annotations

import enum
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PAYLOAD_BYTES = 1 << 20
"""What one rank may bring to a rendezvous."""
MAX_VALUE_BYTES = 1 << 40
"""What one key may hold; memory is taken as the bytes arrive, never from the announced length."""
MAX_SIZE = 1 << 16
"""Ranks in a job."""
MAX_TIMEOUT_MS = 1000 * 86400 * 365
PIECE_BYTES = 256 * 1024
"""The most that is read from one connection before the others have their turn."""

_REQUEST = struct.Struct("!BBHIQQ")
_REPLY = struct.Struct("!BBHIQQ")
_LENGTH = struct.Struct("!I")


class FrameError(Exception):
    """Bytes that are no message of this schema."""


class Kind(enum.IntEnum):
    """What a client asks for."""

    SET = 1
    GET = 2
    JOIN = 3


class Status(enum.IntEnum):
    """How the store answers; the value of all but OK is a text."""

    OK = 0
    TIMEOUT = 1
    REFUSED = 2
    ENDED = 3


_VALUE_LIMIT_BYTES = {Kind.SET: MAX_VALUE_BYTES, Kind.GET: 0, Kind.JOIN: MAX_PAYLOAD_BYTES}


@dataclass(frozen=True)
class Request:
    """One question: SET key value · GET key · JOIN key (the round's name) value (the payload)."""

    kind: Kind
    key: str
    value: bytes = b""
    size: int = 0
    timeout_ms: int = 0


@dataclass(frozen=True)
class Reply:
    """One answer.

    ``count`` is the number of payloads of a completed round, or for ENDED the rank that has ended;
    ``generation`` means something for a completed round only.
    """

    status: Status
    value: bytes = b""
    count: int = 0
    generation: int = 0


def _encoded_key(key: str) -> bytes:
    encoded = key.encode()
    if not 1 <= len(encoded) <= 255:
        raise ValueError(f"a key has 1 to 255 bytes, this one has {len(encoded)}")
    return encoded


def encode_request(request: Request) -> list[bytes]:
    """The pieces to send, the value itself uncopied. ValueError if a limit is passed."""
    key = _encoded_key(request.key)
    if len(request.value) > _VALUE_LIMIT_BYTES[request.kind]:
        raise ValueError(
            f"{request.kind.name} of {request.key!r}: {len(request.value)} bytes are more than the "
            f"{_VALUE_LIMIT_BYTES[request.kind]} that are allowed"
        )
    if not 0 <= request.size <= MAX_SIZE:
        raise ValueError(f"{request.size} is no number of ranks between 1 and {MAX_SIZE}")
    timeout_ms = min(max(request.timeout_ms, 0), MAX_TIMEOUT_MS)
    head = _REQUEST.pack(request.kind, len(key), 0, request.size, timeout_ms, len(request.value))
    return [head + key, request.value]


def encode_reply(reply: Reply) -> list[bytes]:
    """The pieces to send, the value itself uncopied."""
    head = _REPLY.pack(reply.status, 0, 0, reply.count, reply.generation, len(reply.value))
    return [head, reply.value]


class _Reader:
    """Collects a head of fixed length, then a body whose length the head gave."""

    def __init__(self, head_bytes: int) -> None:
        self._head_bytes = head_bytes
        self._head = b""
        # getvalue() of a BytesIO hands over its buffer without copying it, and it grows with what
        # has arrived: a value of several GB costs its own size and no more.
        self._body = io.BytesIO()
        self._left_bytes = head_bytes

    @property
    def need(self) -> int:
        """Bytes wanted next, at most PIECE_BYTES; more must not be fed."""
        return min(self._left_bytes, PIECE_BYTES)

    def _body_bytes(self, head: bytes) -> int:
        raise NotImplementedError

    def _take(self, data: bytes) -> bool:
        """Takes bytes; True once the message is complete."""
        if len(data) > self._left_bytes:
            raise FrameError("more bytes than the message has")
        self._left_bytes -= len(data)
        if len(self._head) < self._head_bytes:
            self._head += data
            if self._left_bytes > 0:
                return False
            self._left_bytes = self._body_bytes(self._head)
        else:
            self._body.write(data)
        return self._left_bytes == 0


class RequestReader(_Reader):
    """Turns the bytes of one request, as they come, into a :class:`Request`."""

    def __init__(self) -> None:
        super().__init__(_REQUEST.size)
        self._key: bytes | None = None

    def _body_bytes(self, head: bytes) -> int:
        kind, key_bytes, zero, size, timeout_ms, value_bytes = _REQUEST.unpack(head)
        if kind not in _VALUE_LIMIT_BYTES or zero != 0 or key_bytes == 0:
            raise FrameError("not a request")
        limit_bytes = _VALUE_LIMIT_BYTES[Kind(kind)]
        if value_bytes > limit_bytes or size > MAX_SIZE or timeout_ms > MAX_TIMEOUT_MS:
            raise FrameError("a number is out of bounds")
        if kind == Kind.JOIN and size == 0:
            raise FrameError("a round of nobody")
        self._value_bytes = int(value_bytes)
        return int(key_bytes)

    def feed(self, data: bytes) -> Request | None:
        """Takes the next bytes; returns the request once it is complete.

        Raises:
            FrameError: these bytes are no request.
        """
        if not self._take(data):
            return None
        if self._key is None:  # what is complete is the key; the value comes next
            self._key = self._body.getvalue()
            self._body = io.BytesIO()
            self._left_bytes = self._value_bytes
            if self._left_bytes > 0:
                return None
        kind, _, _, size, timeout_ms, _ = _REQUEST.unpack(self._head)
        try:
            key = self._key.decode()
        except UnicodeDecodeError as error:
            raise FrameError("a key that is no text") from error
        return Request(Kind(kind), key, self._body.getvalue(), size, timeout_ms)


class ReplyReader(_Reader):
    """Turns the bytes of one reply, as they come, into a :class:`Reply`."""

    def __init__(self) -> None:
        super().__init__(_REPLY.size)

    def _body_bytes(self, head: bytes) -> int:
        status, *_, value_bytes = _REPLY.unpack(head)
        if status not in set(Status) or value_bytes > MAX_VALUE_BYTES:
            raise FrameError("not a reply")
        return int(value_bytes)

    def feed(self, data: bytes) -> Reply | None:
        """Takes the next bytes; returns the reply once it is complete.

        Raises:
            FrameError: these bytes are no reply.
        """
        if not self._take(data):
            return None
        status, _, _, count, generation, _ = _REPLY.unpack(self._head)
        return Reply(Status(status), self._body.getvalue(), count, generation)


def pack_payloads(payloads: Sequence[bytes]) -> bytes:
    """Joins the payloads of a round, in rank order, into one value."""
    return b"".join(_LENGTH.pack(len(payload)) + payload for payload in payloads)


def unpack_payloads(value: bytes, count: int) -> list[bytes]:
    """Takes apart what :func:`pack_payloads` joined.

    Raises:
        FrameError: the value does not hold exactly ``count`` payloads.
    """
    payloads = []
    at = 0
    for _ in range(count):
        if at + _LENGTH.size > len(value):
            raise FrameError("a payload is missing")
        (length,) = _LENGTH.unpack_from(value, at)
        at += _LENGTH.size
        payloads.append(value[at : at + length])
        if len(payloads[-1]) != length:
            raise FrameError("a payload is cut short")
        at += length
    if at != len(value):
        raise FrameError("bytes after the last payload")
    return payloads
