"""The store's server: one thread that sleeps until something happens; knows no launcher, no engine.

It reads from nobody who has not proved membership of the job, and values are bytes to it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from pathlib import Path

from horovod.common import frames, logs, proof, sockets
from horovod.common.frames import Kind, Reply, Request, Status

LOG = logging.getLogger("horovod")

SOCKET_NAME = "store.sock"

_MAX_UNPROVED = 128
_UNPROVED_PATIENCE_S = 0.5  # an unproved connection gives way to a newer one only after this
_NO_DESCRIPTOR_PAUSE_S = 0.1
_MAX_KEYS = 1 << 16
_BACKLOG = 1024


def proof_context(job_id: str) -> bytes:
    """What a proof to the store is bound to."""
    return proof.context("store", job_id)


class _Connection:
    """One accepted connection: first unproved, then read from, then waiting or written to."""

    def __init__(self, sock: socket.socket, acceptor: proof.Acceptor, now: float) -> None:
        self.sock = sock
        self.acceptor: proof.Acceptor | None = acceptor
        self.since = now
        self.rank = -1
        self.reader = frames.RequestReader()
        self.out: deque[memoryview] = deque()
        self.waiting: Request | None = None
        self.deadline = 0.0


class _Round:
    """One rendezvous under way: who joined, each with its payload and the connection to answer."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: dict[int, tuple[bytes, _Connection]] = {}
        self.gone: set[int] = set()  # joined, and waited no longer while others still did

    def missing_text(self, name: str) -> str:
        """Who keeps the round waiting.

        The ranks run out of time one after the other: those that gave up before are not to blame,
        and are told apart from those that never came.
        """
        never = [r for r in range(self.size) if r not in self.entries and r not in self.gone]
        gone = sorted(self.gone)
        if not never:
            return f"{_ranks(gone)} of {self.size} joined {name!r} but did not wait for the others"
        note = f" ({_ranks(gone)} joined and left again)" if gone else ""
        return f"{_ranks(never)} of {self.size} did not join {name!r}{note}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


class StoreServer:
    """Serves one job's store at ``store.sock`` in the job's directory.

    Usable as a context manager. All methods may be called from any thread.

    Args:
        directory: the job's directory.
        key: the job's key.
        job_id: the job's identity, part of every proof.
    """

    def __init__(self, directory: Path, key: bytes, job_id: str) -> None:
        self.address = f"unix:{directory / SOCKET_NAME}"
        self._path = directory / SOCKET_NAME
        self._key = key
        self._bound = proof_context(job_id)
        self._lock = threading.Lock()  # guards the four below, which other threads use
        self._values: dict[str, bytes] = {}
        self._changed: deque[str] = deque()
        self._ended: dict[int, str] = {}  # how each rank ended, the first one first
        self._closing = False
        # What follows belongs to the server's thread.
        self._waiters: dict[str, set[_Connection]] = {}
        self._rounds: dict[str, _Round] = {}
        self._generations: dict[str, int] = {}
        self._connections: set[_Connection] = set()
        self._unproved: dict[_Connection, None] = {}  # oldest first
        self._resume_at: float | None = None  # set while no connection is accepted
        self._refused = 0
        self._refusal_log = logs.Rarely()
        self._descriptor_log = logs.Rarely()
        self._resources = contextlib.ExitStack()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Binds the socket and starts the thread."""
        with contextlib.ExitStack() as resources:
            self._listener = resources.enter_context(sockets.listen(self._path, _BACKLOG))
            resources.callback(self._path.unlink, missing_ok=True)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            resources.callback(os.close, self._bell)
            self._selector = resources.enter_context(selectors.DefaultSelector())
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._bell, selectors.EVENT_READ, self._take_changes)
            thread = threading.Thread(target=self._serve, name="horovod-store", daemon=True)
            thread.start()
            self._thread = thread
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Stops the thread, closes every connection and removes the socket. May be repeated."""
        with self._lock:
            self._closing = True
        thread, self._thread = self._thread, None
        if thread is not None:
            os.eventfd_write(self._bell, 1)
            thread.join()
        self._resources.close()

    def __enter__(self) -> StoreServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, key: str, value: bytes) -> None:
        """Sets ``key``; clients that wait for it get it."""
        with self._lock:
            self._values[key] = value
            self._changed.append(key)
            self._ring()

    def end(self, rank: int, how: str) -> None:
        """Takes note that ``rank`` will join no round any more.

        Rounds that lack it fail at once, those under way and those that others join later.

        Args:
            rank: who has ended.
            how: in words, for example ``exit code 0``.
        """
        with self._lock:
            self._ended.setdefault(rank, how)
            self._ring()

    def get(self, key: str) -> bytes | None:
        """The value of ``key`` at this moment, None if nobody has set it. Never waits."""
        with self._lock:
            return self._values.get(key)

    def pop(self, key: str) -> bytes | None:
        """Like :meth:`get`, and forgets the value: for results too large to keep twice."""
        with self._lock:
            return self._values.pop(key, None)

    def items(self, prefix: str) -> dict[str, bytes]:
        """Every key that starts with ``prefix``, with its value, at this moment."""
        with self._lock:
            return {k: v for k, v in self._values.items() if k.startswith(prefix)}

    def _ring(self) -> None:
        """Wakes the server's thread; the caller holds the lock."""
        if self._thread is not None and not self._closing:
            os.eventfd_write(self._bell, 1)

    # --- the server's thread ---

    def _serve(self) -> None:
        try:
            while not self._closing:
                for ready, events in self._selector.select(self._sleep_s(time.monotonic())):
                    if isinstance(ready.data, _Connection):
                        self._advance(ready.data, events)
                    else:
                        ready.data()
                self._fail_hopeless_rounds()
                self._expire(time.monotonic())
        finally:
            for connection in list(self._connections):
                self._drop(connection)

    def _sleep_s(self, now: float) -> float | None:
        """Seconds to the next deadline; None, for ever, when there is none."""
        deadlines = [c.since + proof.HANDSHAKE_S for c in self._unproved]
        deadlines += [c.deadline for c in self._connections if c.waiting is not None]
        if self._resume_at is not None:
            deadlines.append(self._resume_at)
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _expire(self, now: float) -> None:
        for connection in [c for c in self._unproved if now >= c.since + proof.HANDSHAKE_S]:
            self._refuse(connection)
        for connection in list(self._connections):
            if connection.waiting is not None and now >= connection.deadline:
                self._answer(connection, Reply(Status.TIMEOUT, self._missing_text(connection)))
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _pause_accepting(self, until: float) -> None:
        self._resume_at = until
        self._selector.unregister(self._listener)

    def _accept(self) -> None:
        now = time.monotonic()
        if len(self._unproved) >= _MAX_UNPROVED:
            oldest = next(iter(self._unproved))
            if now < oldest.since + _UNPROVED_PATIENCE_S:
                self._pause_accepting(oldest.since + _UNPROVED_PATIENCE_S)
                return
            self._refuse(oldest)
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            if self._descriptor_log.due(now):
                LOG.warning("the store cannot accept a connection: %s", error.strerror)
            self._pause_accepting(now + _NO_DESCRIPTOR_PAUSE_S)
            return
        sock.setblocking(False)
        acceptor = proof.Acceptor(self._key, self._bound)
        connection = _Connection(sock, acceptor, now)
        self._connections.add(connection)
        self._unproved[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._send(connection, [acceptor.greeting])

    def _advance(self, connection: _Connection, events: int) -> None:
        if connection not in self._connections:
            return  # dropped by an earlier event of the same round
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except BlockingIOError:
            return
        except (OSError, EOFError):
            self._drop(connection)
        except (proof.ProofError, frames.FrameError):
            self._refuse(connection)

    def _read(self, connection: _Connection) -> None:
        acceptor = connection.acceptor
        need = connection.reader.need if acceptor is None else acceptor.need
        data = connection.sock.recv(need)
        if not data:
            raise EOFError
        if acceptor is not None:
            answer = acceptor.feed(data)
            if answer is not None:
                connection.acceptor = None
                connection.rank = acceptor.member
                del self._unproved[connection]
                self._send(connection, [answer])
            return
        if connection.waiting is not None or connection.out:
            raise frames.FrameError("a request before the last one was answered")
        request = connection.reader.feed(data)
        if request is not None:
            connection.reader = frames.RequestReader()
            self._handle(connection, request)

    def _handle(self, connection: _Connection, request: Request) -> None:
        if request.kind is Kind.SET:
            with self._lock:
                full = len(self._values) >= _MAX_KEYS and request.key not in self._values
                if not full:
                    self._values[request.key] = request.value
            if full:
                self._answer(connection, Reply(Status.REFUSED, b"the store has too many keys"))
                return
            self._answer(connection, Reply(Status.OK))
            self._wake_waiters(request.key)
            return
        connection.waiting = request
        connection.deadline = time.monotonic() + request.timeout_ms / 1000
        if request.kind is Kind.GET:
            self._waiters.setdefault(request.key, set()).add(connection)
            self._wake_waiters(request.key)
        else:
            self._join(connection, request)

    def _join(self, connection: _Connection, request: Request) -> None:
        name, rank = request.key, connection.rank
        known = self._rounds.get(name)
        size = request.size if known is None else known.size
        if request.size != size or not 0 <= rank < size:
            text = (
                f"rank {rank} joined {name!r} as one of {request.size}, but the round has {size} "
                f"ranks, 0 to {size - 1}"
            )
            self._answer(connection, Reply(Status.REFUSED, text.encode()))
            return
        round_ = self._rounds.setdefault(name, _Round(size))
        replaced = round_.entries.get(rank)
        round_.entries[rank] = (request.value, connection)
        round_.gone.discard(rank)
        if replaced is not None:
            text = f"rank {rank} joined {name!r} again from another connection"
            self._answer(replaced[1], Reply(Status.REFUSED, text.encode()))
        if len(round_.entries) < size:
            return
        del self._rounds[name]
        generation = self._generations[name] = self._generations.get(name, 0) + 1
        payloads = frames.pack_payloads([round_.entries[r][0] for r in range(size)])
        for _, member in round_.entries.values():
            self._answer(member, Reply(Status.OK, payloads, size, generation))

    def _fail_hopeless_rounds(self) -> None:
        """Ends every round that waits for a rank that has ended.

        One that joined and ended is noticed as soon as its connection has closed.
        """
        with self._lock:
            ended = dict(self._ended)
        for name, round_ in list(self._rounds.items()):
            lost = next((r for r in ended if r < round_.size and r not in round_.entries), None)
            if lost is None:
                continue
            text = f"rank {lost} has ended ({ended[lost]}), so {name!r} can't be completed"
            del self._rounds[name]
            for _, member in round_.entries.values():
                self._answer(member, Reply(Status.ENDED, text.encode(), lost))

    def _wake_waiters(self, key: str) -> None:
        with self._lock:
            value = self._values.get(key)
        if value is not None:
            for connection in list(self._waiters.get(key, ())):
                self._answer(connection, Reply(Status.OK, value))

    def _take_changes(self) -> None:
        os.eventfd_read(self._bell)
        while True:
            with self._lock:
                if not self._changed:
                    return
                key = self._changed.popleft()
            self._wake_waiters(key)

    def _missing_text(self, connection: _Connection) -> bytes:
        request = connection.waiting
        assert request is not None
        if request.kind is Kind.GET:
            return f"nobody set {request.key!r}".encode()
        return self._rounds[request.key].missing_text(request.key).encode()

    def _leave(self, connection: _Connection) -> None:
        """Ends the connection's wait: it stands in no round and waits for no key."""
        request, connection.waiting = connection.waiting, None
        if request is None:
            return
        if request.kind is Kind.GET:
            self._waiters[request.key].discard(connection)
            if not self._waiters[request.key]:
                del self._waiters[request.key]
            return
        round_ = self._rounds.get(request.key)
        entry = round_.entries.get(connection.rank) if round_ is not None else None
        if round_ is not None and entry is not None and entry[1] is connection:
            del round_.entries[connection.rank]
            round_.gone.add(connection.rank)
            if not round_.entries:
                del self._rounds[request.key]

    def _answer(self, connection: _Connection, reply: Reply) -> None:
        self._leave(connection)
        self._send(connection, frames.encode_reply(reply))

    def _send(self, connection: _Connection, pieces: list[bytes]) -> None:
        connection.out.extend(memoryview(piece) for piece in pieces if piece)
        try:
            self._flush(connection)
        except BlockingIOError:
            self._selector.modify(
                connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection
            )
        except OSError:
            self._drop(connection)

    def _flush(self, connection: _Connection) -> None:
        """Sends until all is out (then reads only), or PIECE_BYTES are, or BlockingIOError."""
        budget = frames.PIECE_BYTES
        while connection.out:
            if budget <= 0:
                raise BlockingIOError
            piece = connection.out[0]
            sent = connection.sock.send(piece[: frames.PIECE_BYTES])
            budget -= sent
            if sent == len(piece):
                connection.out.popleft()
            else:
                connection.out[0] = piece[sent:]
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _refuse(self, connection: _Connection) -> None:
        """Drops a peer that is no member, or does not speak the schema, with a rare log line."""
        self._drop(connection)
        self._refused += 1
        if self._refusal_log.due(time.monotonic()):
            LOG.warning(
                "the store refused a connection that did not prove it belongs to this job "
                "(%d so far)",
                self._refused,
            )

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._unproved.pop(connection, None)
            self._leave(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()
