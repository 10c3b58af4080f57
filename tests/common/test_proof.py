"""The mutual challenge: who has the key and means the same door gets in, nobody else."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common import proof

KEY = bytes(range(32))
BOUND = proof.context("store", "0123456789abcdef")


def accept(sock: socket.socket, key: bytes, bound: bytes) -> proof.Acceptor:
    """Runs the accepting side to its end; raises what the acceptor raises and closes."""
    acceptor = proof.Acceptor(key, bound)
    with sock:
        sock.sendall(acceptor.greeting)
        answer = None
        while answer is None:
            answer = acceptor.feed(sock.recv(acceptor.need))
        sock.sendall(answer)
    return acceptor


def meet(connect_key, connect_bound, accept_key, accept_bound, member=3):
    """Both sides over a socket pair; returns (acceptor or its error, connecting side's error)."""
    ours, theirs = socket.socketpair()
    accepted = []

    def run():
        try:
            accepted.append(accept(theirs, accept_key, accept_bound))
        except proof.ProofError as error:
            accepted.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    failure = None
    with ours:
        try:
            proof.prove(ours, connect_key, connect_bound, member, time.monotonic() + 3)
        except proof.ProofError as error:
            failure = error
    thread.join()
    return accepted[0], failure


def test_members_prove_themselves_and_the_rank_is_known():
    acceptor, failure = meet(KEY, BOUND, KEY, BOUND)
    assert failure is None
    assert acceptor.member == 3


@pytest.mark.parametrize(
    ("key", "bound"),
    [
        (bytes(32), BOUND),
        (KEY, proof.context("store", "fedcba9876543210")),
        (KEY, proof.context("engine", "0123456789abcdef")),
    ],
)
def test_another_key_job_or_door_is_refused(key, bound):
    accepted, failure = meet(key, bound, KEY, BOUND)
    assert isinstance(accepted, proof.ProofError)
    assert isinstance(failure, proof.ProofError)


def test_the_connecting_side_refuses_an_impostor_that_only_echoes():
    """Whoever has no key cannot answer, not even by sending back what it was sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HVDproof" + bytes(32))

        def echo():
            hello = theirs.recv(1 << 10)
            theirs.sendall(hello[-32:])

        thread = threading.Thread(target=echo)
        thread.start()
        with pytest.raises(proof.ProofError, match="does not belong"):
            proof.prove(ours, KEY, BOUND, 0, time.monotonic() + 3)
        thread.join()


def test_a_silent_other_end_costs_the_deadline_and_no_more():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        began = time.monotonic()
        with pytest.raises(proof.ProofError):
            proof.prove(ours, KEY, BOUND, 0, began + 0.2)
        assert time.monotonic() - began < 1.0


def test_a_replayed_hello_does_not_fit_the_next_nonce():
    first = proof.Acceptor(KEY, BOUND)
    recorded = bytearray()

    class Tap:
        """The first acceptor behind a socket's face, writing down what the client says."""

        def __init__(self):
            self._inbox = bytearray(first.greeting)

        def settimeout(self, _):
            pass

        def recv(self, count):
            data = bytes(self._inbox[:count])
            del self._inbox[:count]
            return data

        def sendall(self, data):
            recorded.extend(data)
            self._inbox += first.feed(data)

    proof.prove(Tap(), KEY, BOUND, 1, time.monotonic() + 3)
    assert first.member == 1
    with pytest.raises(proof.ProofError, match="wrong proof"):
        proof.Acceptor(KEY, BOUND).feed(bytes(recorded))


@given(st.binary(min_size=1, max_size=76))
def test_random_bytes_are_never_a_proof(data):
    acceptor = proof.Acceptor(KEY, BOUND)
    try:
        assert acceptor.feed(data) is None
    except proof.ProofError:
        return
    assert b"HVDproof".startswith(data[:8])


@given(st.lists(st.text(max_size=8), max_size=4), st.lists(st.text(max_size=8), max_size=4))
def test_different_contexts_never_encode_alike(one, other):
    assert (proof.context(*one) == proof.context(*other)) == (one == other)
