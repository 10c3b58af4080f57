"""Connects the ranks of one host and gathers what an engine needs; knows nothing of collectives.

Every rank opens a door (a Unix socket in the job's directory), the ranks meet in the store, and
each connects to all lower ranks and lets all higher ones in. Both ends prove that they belong to
this job and this generation and that they are the ranks they say. Then each gives the other its
shared memory and its doorbell as descriptors, so that nothing has a name that could leak or be
guessed. The engine gets plain descriptors; it never binds, connects or accepts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import resource
import secrets
import selectors
import socket
import stat
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from horovod.common import logs, proof, sockets
from horovod.common.config import Settings
from horovod.common.exceptions import HorovodInternalError, PeerLostError, ResourceError
from horovod.common.store import RankEnded, StoreClient, StoreError, StoreTimeout

VERSION = 1
"""Version of what ranks tell each other here and of what engines speak over the descriptors."""

_MAX_CARD_BYTES = 16 << 10
_MAX_SETS_TEXT = 1000  # characters of a card that say which process sets a rank wants
_LINKS_S = 5.0  # after all have met, links get at least this long, however late the last one came
_CAUSE_S = 0.2  # how long to look for the reason why a peer closed
_NEWS_S = 0.5  # how often a rank that waits for others looks whether one of them has given up
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GIFT = struct.Struct("!8sQ")
_GIFT_MAGIC = b"HVDwires"
_MFD_NOEXEC_SEAL = 0x0008  # not in Python's os yet
_MAX_STRANGERS = 64
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.EFBIG)

_T = TypeVar("_T")


class _Closable(Protocol):
    def close(self) -> object:
        """May be called again."""


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()
"""All that attempts to connect have open now or had once."""


def _close_in_forked_child() -> None:
    """A child that is forked while another thread connects keeps nothing of it."""
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_in_forked_child)


class _Descriptors(contextlib.ExitStack):
    """Descriptors that are closed together."""

    def __init__(self) -> None:
        super().__init__()
        _open.add(self)

    def own(self, descriptor: int) -> int:
        self.callback(os.close, descriptor)
        return descriptor


@dataclass
class Wires:
    """What one engine needs of its peers: descriptors by rank, -1 where there is none.

    The descriptors belong to this object; whoever wants to keep one duplicates it.
    """

    generation: int
    plan: dict[str, int]
    """Rank 0's, the same on every rank."""
    hosts: list[int]
    """Index of each rank's host, in order of appearance."""
    names: list[str]
    """``host pid 123`` by rank, for messages."""
    segments: list[int]
    doorbells: list[int]
    sockets: list[int]
    pidfds: list[int]
    _resources: contextlib.ExitStack = field(default_factory=_Descriptors, repr=False)

    def close(self) -> None:
        """Closes every descriptor. Calling it again does nothing."""
        self._resources.close()


def world_of_one(settings: Settings, plan: Mapping[str, int]) -> Wires:
    """The wires of a process that is alone: none."""
    name = f"{settings.hostname} pid {os.getpid()}"
    return Wires(0, dict(plan), [0], [name], [-1], [-1], [-1], [-1])


def connect(
    settings: Settings,
    plan: Mapping[str, int],
    memory_bytes: int,
    store: StoreClient,
    process_sets: Sequence[Sequence[int]] = (),
) -> Wires:
    """Meets all ranks of the job and connects this one to each of them. Every rank must call it.

    Blocks until all have joined, at most ``settings.start_timeout_s``, and a few seconds more for
    the links. Whatever is raised, no descriptor and no file is left behind.

    Args:
        settings: this rank's placement and time limit.
        plan: what shapes every schedule; rank 0's is used by all.
        memory_bytes: size of each rank's shared memory; rank 0's number is used by all.
        store: this rank's client of the job's store.
        process_sets: the ranks of each set that this rank is about to register.

    Returns:
        The wires; close them once an engine has duplicated what it needs.

    Raises:
        ResourceError: no memory, descriptor or file on this rank; the text says which.
        PeerLostError: a rank ended, left, or did not answer; ``rank`` says which.
        HorovodInternalError: ranks did not come, or are not of this version; the text names them.
        ValueError: ranks want different process sets. Every rank raises it.
    """
    return _Wiring(settings, plan, memory_bytes, store, process_sets).run()


def _sets_text(process_sets: Sequence[Sequence[int]]) -> str:
    """The sets in words that differ if the sets do, however many there are."""
    text = str([list(ranks) for ranks in process_sets])
    if len(text) <= _MAX_SETS_TEXT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[: _MAX_SETS_TEXT - 200]}… ({len(process_sets)} sets, SHA-256 {digest})"


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others when they meet."""

    host: str
    pid: int
    door: str
    memory_bytes: int
    plan: dict[str, int]
    process_sets: str

    def encode(self) -> bytes:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}).encode()

    @staticmethod
    def decode(data: bytes) -> _Card:
        """Raises ValueError, saying what is wrong, if the bytes are no card of this version."""
        if len(data) > _MAX_CARD_BYTES:
            raise ValueError(f"{len(data)} bytes instead of a short card")
        try:
            card = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError("bytes that are no card") from error
        version = card.get("version") if isinstance(card, dict) else None
        if version != VERSION:
            raise ValueError(f"a card of version {version!r}, this rank has version {VERSION}")
        host, pid, door, plan = (card.get(k) for k in ("host", "pid", "door", "plan"))
        if not (isinstance(host, str) and type(pid) is int and isinstance(door, str)):
            raise ValueError("a card without host, pid or door")
        memory_bytes = card.get("memory_bytes")
        if type(memory_bytes) is not int or memory_bytes <= 0:
            raise ValueError("a card without memory_bytes")
        if not isinstance(plan, dict) or any(type(value) is not int for value in plan.values()):
            raise ValueError("a card without a plan")
        process_sets = card.get("process_sets")
        if not isinstance(process_sets, str):
            raise ValueError("a card without process_sets")
        if door != os.path.basename(door):
            raise ValueError("a door outside the job's directory")
        return _Card(host, pid, door, memory_bytes, plan, process_sets)


class _Guest:
    """A connection that was accepted and is not linked yet."""

    def __init__(self, sock: socket.socket, acceptor: proof.Acceptor, now: float) -> None:
        self.sock = sock
        self.acceptor: proof.Acceptor | None = acceptor
        self.rank = -1  # until it has proved that it is one we wait for
        self.deadline = now + proof.HANDSHAKE_S


def _make_segment(size_bytes: int) -> int:
    """A memfd whose pages exist (no SIGBUS later) and whose size nobody can change."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("horovod", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3
            raise
        descriptor = os.memfd_create("horovod", flags)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _flaw(segment: int, doorbell: int, size_bytes: int) -> str | None:
    """What makes the descriptors of a peer unsafe to use, or None."""
    about = os.fstat(segment)
    if not stat.S_ISREG(about.st_mode) or about.st_size != size_bytes:
        return f"{about.st_size} bytes of shared memory instead of {size_bytes}"
    if about.st_blocks * 512 < size_bytes:
        return "shared memory that is not allocated"
    try:
        sealed = fcntl.fcntl(segment, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # EINVAL: no memfd
        sealed = False
    if not sealed:
        return "shared memory that is not sealed"
    if os.readlink(f"/proc/self/fd/{doorbell}") != "anon_inode:[eventfd]":
        return "a doorbell that is no eventfd"
    return None


class _Wiring:
    """One attempt to connect; owns every descriptor until :meth:`run` hands them over."""

    def __init__(
        self,
        settings: Settings,
        plan: Mapping[str, int],
        memory_bytes: int,
        store: StoreClient,
        process_sets: Sequence[Sequence[int]],
    ) -> None:
        self._rank = settings.rank
        self._size = settings.size
        self._host = settings.hostname
        self._timeout_s = settings.start_timeout_s
        self._own_plan = dict(plan)
        self._process_sets = _sets_text(process_sets)
        self._store = store
        self._generation = 0
        self._told = False  # that another rank has given up
        self._names: list[str] = []
        self._memory_bytes = memory_bytes
        # rank -> (segment, doorbell, socket, pidfd)
        self._links: dict[int, tuple[int, int, int, int]] = {}
        self._resources = _Descriptors()
        self._refused = 0
        self._refusal_log = logs.Rarely()

    def run(self) -> Wires:
        began = time.monotonic()
        with self._resources, contextlib.ExitStack() as door:  # the door closes in any case
            try:
                path = self._store.directory / f"rank{self._rank}-{secrets.token_hex(4)}.sock"
                listener = self._obtain("a door", lambda: sockets.listen(path, self._size + 16))
                door.callback(path.unlink, missing_ok=True)
                door.enter_context(listener)
                _open.add(listener)
                cards = self._meet(path.name)
                self._names = [f"{card.host} pid {card.pid}" for card in cards]
                self._memory_bytes = cards[0].memory_bytes
                self._make_own()
                deadline = max(began + self._timeout_s, time.monotonic() + _LINKS_S)
                for rank in range(self._rank):
                    self._visit(rank, path.with_name(cards[rank].door), deadline)
                self._receive_guests(listener, deadline)
            except HorovodInternalError as error:
                self._leave_word(error)
                raise
            except OSError as error:
                failure = self._error(HorovodInternalError, f"cannot connect the ranks: {error}")
                self._leave_word(failure)
                raise failure from error
            hosts = list(dict.fromkeys(card.host for card in cards))
            links = [self._links[rank] for rank in range(self._size)]
            return Wires(
                generation=self._generation,
                plan=cards[0].plan,
                hosts=[hosts.index(card.host) for card in cards],
                names=self._names,
                segments=[link[0] for link in links],
                doorbells=[link[1] for link in links],
                sockets=[link[2] for link in links],
                pidfds=[link[3] for link in links],
                _resources=self._resources.pop_all(),
            )

    # --- meeting ---

    def _meet(self, door: str) -> list[_Card]:
        plan = self._own_plan if self._rank == 0 else {}
        card = _Card(
            self._host, os.getpid(), door, self._memory_bytes, plan, self._process_sets
        ).encode()
        try:
            self._generation, payloads = self._store.rendezvous(
                "init", self._size, card, self._timeout_s
            )
        except StoreTimeout as error:
            raise self._error(
                HorovodInternalError,
                f"{error}. HOROVOD_START_TIMEOUT (--start-timeout) sets how long to wait",
            ) from error
        except RankEnded as error:
            raise self._error(PeerLostError, str(error), error.rank) from error
        cards = []
        for rank, payload in enumerate(payloads):
            try:
                cards.append(_Card.decode(payload))
            except ValueError as error:
                raise self._error(
                    HorovodInternalError,
                    f"rank {rank} sent {error}: all ranks must run the same horovod",
                    rank,
                ) from error
        self._check_process_sets(cards)
        return cards

    def _check_process_sets(self, cards: Sequence[_Card]) -> None:
        """Raises ValueError, naming the same two ranks everywhere, if ranks want other sets."""
        first = cards[0].process_sets
        other = next((r for r, card in enumerate(cards) if card.process_sets != first), None)
        if other is not None:
            raise ValueError(
                f"[horovod {self._rank}/{self._size}] init: every rank must give the same "
                f"process_sets in the same order, but rank 0 gave {first} and rank {other} gave "
                f"{cards[other].process_sets}"
            )

    # --- own memory and doorbell ---

    def _make_own(self) -> None:
        what = f"{self._memory_bytes} bytes of shared memory"
        segment = self._resources.own(self._obtain(what, lambda: _make_segment(self._memory_bytes)))
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        bell = self._resources.own(self._obtain("a doorbell", lambda: os.eventfd(0, flags)))
        self._links[self._rank] = (segment, bell, -1, -1)

    # --- links ---

    def _bound(self, accepter: int) -> bytes:
        return proof.context("engine", self._store.job_id, self._generation, accepter)

    def _visit(self, rank: int, door: Path, deadline: float) -> None:
        """Links to a lower rank: connect, prove, give, take."""
        try:
            with self._obtain("a socket", lambda: sockets.connect(door, deadline)) as sock:
                _open.add(sock)
                proof.prove(sock, self._store.key, self._bound(rank), self._rank, deadline)
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                self._give(sock)
                self._link(rank, sock, *self._take(sock, rank))
        except (OSError, EOFError, proof.ProofError) as error:
            raise self._lost(rank, error) from error

    def _receive_guests(self, listener: socket.socket, deadline: float) -> None:
        """Links to every higher rank; a stranger gets no further than the door."""
        guests: dict[_Guest, None] = {}  # oldest first
        news_at = time.monotonic() + _NEWS_S
        with self._obtain("an epoll descriptor", selectors.DefaultSelector) as selector:
            _open.add(selector)
            selector.register(listener, selectors.EVENT_READ)

            def dismiss(guest: _Guest) -> None:
                del guests[guest]
                selector.unregister(guest.sock)
                guest.sock.close()

            try:
                while len(self._links) < self._size:
                    now = time.monotonic()
                    if now >= deadline:
                        raise self._unanswered()
                    for guest in [g for g in guests if now >= g.deadline]:
                        self._refuse()
                        dismiss(guest)
                    if now >= news_at:
                        self._raise_if_given_up()
                        news_at = time.monotonic() + _NEWS_S
                    until = min([deadline, news_at, *(g.deadline for g in guests)])
                    for ready, _ in selector.select(max(until - now, 0.0)):
                        if ready.data is not None:
                            if ready.data in guests and self._serve(ready.data):
                                dismiss(ready.data)
                            continue
                        if len(guests) >= self._size + _MAX_STRANGERS:
                            self._refuse()
                            dismiss(next(iter(guests)))
                        newcomer = self._admit(listener)
                        if newcomer is not None:
                            guests[newcomer] = None
                            selector.register(newcomer.sock, selectors.EVENT_READ, newcomer)
            finally:
                for guest in guests:
                    guest.sock.close()

    def _admit(self, listener: socket.socket) -> _Guest | None:
        try:
            sock, _ = self._obtain("a socket", listener.accept)
        except OSError:  # who knocked has gone again
            return None
        _open.add(sock)
        sock.setblocking(False)
        acceptor = proof.Acceptor(self._store.key, self._bound(self._rank))
        with contextlib.suppress(OSError):  # gone as well: reading from it will say so
            sock.send(acceptor.greeting)
        return _Guest(sock, acceptor, time.monotonic())

    def _serve(self, guest: _Guest) -> bool:
        """Goes one step on with a guest; True if it is done with, linked or not.

        Raises:
            PeerLostError: a rank that had proved itself failed afterwards.
        """
        try:
            if guest.acceptor is not None:
                data = guest.sock.recv(guest.acceptor.need)
                if not data:
                    return True
                answer = guest.acceptor.feed(data)
                if answer is not None:
                    rank = guest.acceptor.member
                    if not self._rank < rank < self._size or rank in self._links:
                        self._refuse()
                        return True
                    guest.rank, guest.acceptor = rank, None
                    guest.deadline = math.inf  # the deadline of the whole rules from here on
                    guest.sock.send(answer)
                return False
            segment, bell = self._take(guest.sock, guest.rank)
            self._give(guest.sock)
            # The guest's own socket is closed with the guest; the link lives on a duplicate.
            with self._obtain("a socket", guest.sock.dup) as sock:
                self._link(guest.rank, sock, segment, bell)
            return True
        except BlockingIOError:
            return False
        except (OSError, EOFError, proof.ProofError) as error:
            if guest.rank < 0:
                if isinstance(error, proof.ProofError):
                    self._refuse()
                return True
            raise self._lost(guest.rank, error) from error

    def _refuse(self) -> None:
        """Counts somebody who is sent away from the door, with a rare log line."""
        self._refused += 1
        if self._refusal_log.due(time.monotonic()):
            logs.LOGGER.warning(
                "the door of rank %d refused a connection that did not prove it belongs there "
                "(%d so far)",
                self._rank,
                self._refused,
            )

    def _give(self, sock: socket.socket) -> None:
        segment, bell, _, _ = self._links[self._rank]
        gift = _GIFT.pack(_GIFT_MAGIC, self._memory_bytes)
        self._obtain(
            "descriptors in flight", lambda: sockets.send_descriptors(sock, gift, [segment, bell])
        )

    def _take(self, sock: socket.socket, rank: int) -> tuple[int, int]:
        data, descriptors = self._obtain(
            "a descriptor", lambda: sockets.receive_descriptors(sock, _GIFT.size, 2)
        )
        for descriptor in descriptors:
            self._resources.own(descriptor)
        if not data:
            raise EOFError("it closed the connection")
        flaw: str | None = "no shared memory"
        if data == _GIFT.pack(_GIFT_MAGIC, self._memory_bytes) and len(descriptors) == 2:
            flaw = _flaw(descriptors[0], descriptors[1], self._memory_bytes)
        if flaw is not None:
            raise self._error(HorovodInternalError, f"rank {rank} handed over {flaw}", rank)
        return descriptors[0], descriptors[1]

    def _link(self, rank: int, sock: socket.socket, segment: int, bell: int) -> None:
        pidfd = self._pidfd(sockets.peer_pid(sock))
        sock.setblocking(False)
        self._links[rank] = (segment, bell, self._resources.own(sock.detach()), pidfd)

    def _pidfd(self, pid: int) -> int:
        """A descriptor that becomes readable when the peer ends; -1 where there can be none.

        The socket's end of file says the same, so this only covers descriptors that a peer's
        surviving children keep open.
        """
        if pid <= 0:  # the peer lives in another pid namespace
            return -1
        try:
            return self._resources.own(self._obtain("a pidfd", lambda: os.pidfd_open(pid)))
        except OSError:  # forbidden in this container, or the peer has just ended
            return -1

    # --- errors ---

    def _obtain(self, what: str, make: Callable[[], _T]) -> _T:
        """Calls ``make``; a refusal of memory or descriptors becomes a typed error."""
        try:
            return make()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                advice = (
                    f"`ulimit -n` is {limit}, and a rank needs some {8 * self._size + 32} of them"
                )
            elif error.errno in _NO_MEMORY:
                advice = "free memory, or raise the container's memory limit"
            else:
                raise
            raise self._error(
                ResourceError, f"could not get {what}: {error.strerror}; {advice}", self._rank
            ) from error

    def _error(
        self, kind: type[HorovodInternalError], text: str, rank: int | None = None
    ) -> HorovodInternalError:
        host = None
        if rank is not None and self._names:
            host = self._names[rank].rsplit(" pid ", 1)[0]
        text = f"[horovod {self._rank}/{self._size}] init: {text}"
        return kind(text, rank=rank, host=host, op="init")

    def _lost(self, rank: int, error: Exception) -> HorovodInternalError:
        """The error for a peer that closed or stayed silent; the first cause, if that is known."""
        given_up = self._given_up(_CAUSE_S)
        text = f"rank {rank} ({self._names[rank]}) could not be linked: {error}"
        return given_up or self._error(PeerLostError, text, rank)

    def _given_up(self, timeout_s: float) -> HorovodInternalError | None:
        """The error for a rank that could not go on and left word of it in the store."""
        try:
            word = json.loads(self._store.get(self._word_key(), timeout_s))
        except StoreError:  # nobody left word, or the store has gone too
            return None
        self._told = True
        rank, blamed, text = int(word["rank"]), int(word["blamed"]), str(word["text"])
        text = f"rank {rank} ({self._names[rank]}) gave up: {text}"
        return self._error(PeerLostError, text, blamed)

    def _raise_if_given_up(self) -> None:
        error = self._given_up(0.0)
        if error is not None:
            raise error

    def _unanswered(self) -> HorovodInternalError:
        missing = [rank for rank in range(self._size) if rank not in self._links]
        who = ", ".join(f"rank {rank} ({self._names[rank]})" for rank in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        text = f"{who}{more} joined but did not connect within {self._timeout_s:g} s"
        return self._error(PeerLostError, text, missing[0])

    def _word_key(self) -> str:
        return f"wiring/{self._generation}"

    def _leave_word(self, error: HorovodInternalError) -> None:
        """Tells those who wait for this rank why it does not come, unless it was told itself."""
        if self._generation > 0 and not self._told:
            blamed = self._rank if error.rank is None else error.rank
            word = {"rank": self._rank, "blamed": blamed, "text": str(error)}
            with contextlib.suppress(StoreError):  # the error itself is what matters here
                self._store.set(self._word_key(), json.dumps(word).encode())
