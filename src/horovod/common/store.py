"""All that a launcher and its workers share: a job's secrets, a key-value store, a rendezvous.

Nobody who has not proved membership of the job is listened to, and values are bytes here: this
file knows neither what a launcher nor what an engine means by them. Keys in use: ``fault/<rank>``
(why a worker's engine failed), ``func`` and ``result/<rank>`` (:func:`horovod.run`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from horovod.common import frames, proof, sockets
from horovod.common.exceptions import HorovodInternalError
from horovod.common.frames import Kind, Reply, Request, Status
from horovod.common.store_server import SOCKET_NAME, StoreServer, proof_context

__all__ = [
    "Job",
    "RankEnded",
    "StoreClient",
    "StoreError",
    "StoreServer",
    "StoreTimeout",
    "make_job",
    "read_key",
]

LOG = logging.getLogger("horovod")

KEY_NAME = "job.key"

_PROGRESS_S = 30.0  # a store that moves no byte for so long is given up
_ANSWER_GRACE_S = 5.0  # what the answer may take on top of the time that was asked for
_CONNECT_S = 10.0


class StoreError(HorovodInternalError):
    """The store cannot be reached, is gone, or refused what was asked."""


class StoreTimeout(StoreError):
    """What was waited for did not come in time; the text names who is missing."""


class RankEnded(StoreError):
    """A rank that is waited for has ended; ``rank`` says which, the text how."""


@dataclass(frozen=True)
class Job:
    """The secrets of one job and the private directory (0700) that holds them."""

    directory: Path
    key: bytes = field(repr=False)
    job_id: str

    @property
    def key_file(self) -> Path:
        """The file (0600) with the key's raw bytes: what HOROVOD_JOB_KEY_FILE names."""
        return self.directory / KEY_NAME

    @property
    def address(self) -> str:
        """Where this job's :class:`StoreServer` listens: what HOROVOD_STORE holds."""
        return f"unix:{self.directory / SOCKET_NAME}"

    def remove(self) -> None:
        """Deletes the directory and all that is in it. Calling it again does nothing."""
        try:
            self.key_file.unlink(missing_ok=True)
            shutil.rmtree(self.directory)
        except FileNotFoundError:
            return
        except OSError as error:
            LOG.warning("the job's directory could not be removed: %s", error)


def make_job(directory: Path | None = None) -> Job:
    """Makes a fresh private directory, below ``directory`` or the system's, with a fresh key in it.

    Returns:
        The job; whoever made it calls :meth:`Job.remove` when it ends.
    """
    place = Path(tempfile.mkdtemp(prefix="horovod-", dir=directory))  # mkdtemp gives 0700
    job = Job(place, secrets.token_bytes(proof.KEY_BYTES), secrets.token_hex(8))
    try:
        descriptor = os.open(job.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(job.key)
    except BaseException:
        job.remove()
        raise
    return job


def read_key(path: str | Path) -> bytes:
    """Reads a job's key from its file.

    Raises:
        StoreError: the file cannot be read or does not hold a key.
    """
    try:
        with open(path, "rb") as file:
            key = file.read(proof.KEY_BYTES + 1)
    except OSError as error:
        raise StoreError(
            f"the job's key cannot be read from {path}: {error.strerror}. Has the job ended?"
        ) from error
    if len(key) != proof.KEY_BYTES:
        raise StoreError(f"{path} does not hold a job key of {proof.KEY_BYTES} bytes")
    return key


def _socket_path(address: str) -> Path:
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path.startswith("/"):
        raise StoreError(f"HOROVOD_STORE={address!r} is no address of the form unix:/path")
    return Path(path)


class StoreClient:
    """A worker's way to the store. All methods may be called from several threads at once.

    A call uses a connection of its own, so that one that waits never keeps another one from
    reporting; one idle connection is kept.

    Args:
        address: HOROVOD_STORE, for example ``unix:/tmp/horovod-x/store.sock``.
        key: the job's key.
        job_id: the job's identity.
        rank: who asks.

    Raises:
        StoreError: there is no store at the address.
    """

    def __init__(self, address: str, key: bytes, job_id: str, rank: int) -> None:
        self._path = _socket_path(address)
        self.key = key
        """The job's key, for proofs at other doors than the store's."""
        self.job_id = job_id
        """The job's identity, part of every proof."""
        self._bound = proof_context(job_id)
        self._rank = rank
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        _clients.add(self)
        self._idle: socket.socket | None = self._connect(_CONNECT_S)

    @property
    def directory(self) -> Path:
        """The job's directory."""
        return self._path.parent

    def set(self, key: str, value: bytes, timeout_s: float = _PROGRESS_S) -> None:
        """Sets ``key``, replacing what it held. Returns once the store has it.

        Args:
            key: 1 to 255 bytes of text.
            value: any number of bytes.
            timeout_s: how long the store may make no progress.
        """
        self._call(Request(Kind.SET, key, value), timeout_s)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits until somebody has set ``key`` and returns its value.

        Raises:
            StoreTimeout: nobody set it in time.
        """
        return self._call(Request(Kind.GET, key, timeout_ms=int(timeout_s * 1000))).value

    def rendezvous(
        self, name: str, size: int, payload: bytes, timeout_s: float
    ) -> tuple[int, list[bytes]]:
        """Waits until ranks 0 to ``size`` - 1 have joined the round ``name``.

        A rank that joins again before the round is complete replaces its first entry; one whose
        connection ends is taken out.

        Args:
            name: the round's name. A completed round frees it for the next one.
            size: how many ranks the round has.
            payload: what this rank shows the others, at most 1 MiB.
            timeout_s: how long to wait.

        Returns:
            The number of completed rounds of that name, this one included, and every rank's
            payload by rank.

        Raises:
            StoreTimeout: somebody did not join in time; the text names the ranks.
            RankEnded: somebody has ended and will never join.
            StoreError: the round has another size, or this rank joined again elsewhere.
        """
        request = Request(Kind.JOIN, name, payload, size, int(timeout_s * 1000))
        reply = self._call(request)
        try:
            return reply.generation, frames.unpack_payloads(reply.value, reply.count)
        except frames.FrameError as error:
            raise StoreError(f"the job's store answered {name!r} with no round: {error}") from error

    def close(self) -> None:
        """Closes every connection; calls that wait, and later ones, raise StoreError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, None
            for sock in self._open:
                with contextlib.suppress(OSError):  # the store may have closed it first
                    sock.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread that uses it
        if idle is not None:
            self._discard(idle)

    def abandon(self) -> None:
        """Closes the descriptors in a forked child, and says nothing to the store."""
        self._lock = threading.Lock()  # a thread that does not exist here may hold the old one
        self._closed, self._idle = True, None
        for sock in self._open:
            sock.close()

    def _connect(self, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        sock = None
        try:
            sock = sockets.connect(self._path, deadline)
            with self._lock:
                self._open.add(sock)
            proof.prove(sock, self.key, self._bound, self._rank, deadline)
        except (OSError, proof.ProofError) as error:
            if sock is not None:
                self._discard(sock)
            raise StoreError(
                f"rank {self._rank} cannot reach the job's store at {self._path}: {error}. "
                f"Has the launcher ended?"
            ) from error
        return sock

    def _discard(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()

    def _give_back(self, sock: socket.socket) -> None:
        """Keeps a connection for the next call, or closes it if one is kept already."""
        with self._lock:
            if not self._closed and self._idle is None:
                self._idle = sock
                return
        self._discard(sock)

    def _call(self, request: Request, progress_s: float = _PROGRESS_S) -> Reply:
        pieces = frames.encode_request(request)
        with self._lock:
            if self._closed:
                raise StoreError("the connection to the job's store is closed")
            sock, self._idle = self._idle, None
        if sock is None:
            sock = self._connect(min(progress_s, _CONNECT_S))
        try:
            reply = self._exchange(sock, pieces, request, progress_s)
        except (OSError, EOFError, frames.FrameError) as error:
            self._discard(sock)
            raise StoreError(
                f"the job's store did not answer {request.kind.name} {request.key!r}: {error}. "
                f"Has the launcher ended?"
            ) from error
        except BaseException:  # an interrupt amid a message: the connection is of no more use
            self._discard(sock)
            raise
        self._give_back(sock)
        if reply.status is Status.OK:
            return reply
        text = reply.value.decode(errors="replace")
        if reply.status is Status.TIMEOUT:
            raise StoreTimeout(f"waited {request.timeout_ms / 1000:g} s: {text}")
        if reply.status is Status.ENDED:
            raise RankEnded(text, rank=reply.count)
        raise StoreError(text)

    def _exchange(
        self, sock: socket.socket, pieces: list[bytes], request: Request, progress_s: float
    ) -> Reply:
        sock.settimeout(progress_s)
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[sock.send(left) :]
        if request.kind is not Kind.SET:
            sock.settimeout(request.timeout_ms / 1000 + _ANSWER_GRACE_S)
        reader = frames.ReplyReader()
        while True:
            data = sock.recv(reader.need)
            if not data:
                raise EOFError("it closed the connection")
            reply = reader.feed(data)
            if reply is not None:
                return reply
            sock.settimeout(progress_s)


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _abandon_in_forked_child() -> None:
    """A child holds no connection of its parent's, whoever made the client and whatever it does."""
    for client in list(_clients):
        client.abandon()


os.register_at_fork(after_in_child=_abandon_in_forked_child)
