"""Proves that both ends of a socket belong to one job; knows nothing of what is said afterwards.

The accepting side sends a nonce. The connecting side answers with its number, a nonce of its own
and an HMAC-SHA256 over both nonces and the *context* (which door, which job, which generation).
The accepting side checks it and answers with an HMAC of its own, under another label so that
neither answer can be reflected. All three messages have a fixed length, so nothing that a stranger
sends is parsed or sizes an allocation, and the accepting side sends nothing that was computed from
the key before the other end has proved itself.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

KEY_BYTES = 32
HANDSHAKE_S = 3.0
"""Seconds that a peer has, from the moment it is accepted, to prove its membership."""

_MAGIC = b"HVDproof"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MEMBER = struct.Struct("!i")
_GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES
_HELLO_BYTES = len(_MAGIC) + _MEMBER.size + _NONCE_BYTES + _MAC_BYTES


class ProofError(Exception):
    """The other end did not prove that it belongs to the job."""


def context(*parts: str | int) -> bytes:
    """Encodes what a proof is bound to, so that no two lists of parts give the same bytes."""
    encoded = [str(part).encode() for part in parts]
    return b"".join(struct.pack("!I", len(part)) + part for part in encoded)


def _mac(
    key: bytes, label: bytes, bound: bytes, member: int, accepter: bytes, other: bytes
) -> bytes:
    message = b"".join(
        (label, struct.pack("!I", len(bound)), bound, _MEMBER.pack(member), accepter, other)
    )
    return hmac.digest(key, message, hashlib.sha256)


class Acceptor:
    """The accepting side as a state machine without I/O, for event loops.

    Send :attr:`greeting`, pass what arrives to :meth:`feed` (never more than :attr:`need` bytes at
    a time), and send what it finally returns.

    Args:
        key: the job's key.
        bound: what the proof is bound to; see :func:`context`.
    """

    def __init__(self, key: bytes, bound: bytes) -> None:
        self._key = key
        self._bound = bound
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = bytearray()
        self.greeting = _MAGIC + self._nonce
        self.member = -1
        """The number the other end gave for itself; it means something once it is proved."""

    @property
    def need(self) -> int:
        """Bytes that are still to come."""
        return _HELLO_BYTES - len(self._received)

    def feed(self, data: bytes) -> bytes | None:
        """Takes bytes of the hello; returns the answer once the other end has proved itself.

        Raises:
            ProofError: the bytes are not a proof. Close the connection; there is nothing to answer.
        """
        self._received += data
        head = min(len(self._received), len(_MAGIC))
        if self._received[:head] != _MAGIC[:head] or self.need < 0:
            raise ProofError("not a hello")
        if self.need > 0:
            return None
        hello = bytes(self._received)
        rest = hello[len(_MAGIC) :]
        (member,) = _MEMBER.unpack_from(rest)
        nonce = rest[_MEMBER.size : _MEMBER.size + _NONCE_BYTES]
        expected = _mac(self._key, b"connects", self._bound, member, self._nonce, nonce)
        if not hmac.compare_digest(expected, rest[-_MAC_BYTES:]):
            raise ProofError("wrong proof")
        self.member = member
        return _mac(self._key, b"accepts", self._bound, member, self._nonce, nonce)


def receive_exactly(sock: socket.socket, count_bytes: int, deadline: float) -> bytes:
    """Reads ``count_bytes`` bytes before the monotonic ``deadline``.

    Raises:
        EOFError: the other end closed.
        TimeoutError: the deadline passed.
    """
    received = bytearray()
    while len(received) < count_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("deadline passed")
        sock.settimeout(left_s)
        piece = sock.recv(count_bytes - len(received))
        if not piece:
            raise EOFError("closed by the other end")
        received += piece
    return bytes(received)


def prove(sock: socket.socket, key: bytes, bound: bytes, member: int, deadline: float) -> None:
    """Runs the connecting side on a connected stream socket. Blocks until the monotonic deadline.

    Args:
        sock: the socket; its time-out is changed.
        key: the job's key.
        bound: what the proof is bound to; see :func:`context`.
        member: the number (rank) that this side says it has.
        deadline: monotonic time by which both sides must have proved themselves.

    Raises:
        ProofError: the other end closed, was too slow, or is not of this job.
    """
    try:
        greeting = receive_exactly(sock, _GREETING_BYTES, deadline)
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise ProofError("the other end does not speak this protocol")
        theirs = greeting[len(_MAGIC) :]
        nonce = secrets.token_bytes(_NONCE_BYTES)
        mine = _mac(key, b"connects", bound, member, theirs, nonce)
        sock.sendall(_MAGIC + _MEMBER.pack(member) + nonce + mine)
        answer = receive_exactly(sock, _MAC_BYTES, deadline)
    except EOFError as error:
        raise ProofError("the other end refused this process, or stopped") from error
    except OSError as error:
        raise ProofError(f"no proof was exchanged: {error}") from error
    if not hmac.compare_digest(_mac(key, b"accepts", bound, member, theirs, nonce), answer):
        raise ProofError("the other end does not belong to this job")
