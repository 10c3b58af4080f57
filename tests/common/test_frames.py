"""Laws of the store's message schema: what is encoded is decoded; nothing else gets through."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common import frames
from horovod.common.frames import FrameError, Kind, Reply, Request, Status

KEYS = st.text(min_size=1, max_size=60)
REQUESTS = st.one_of(
    st.builds(Request, st.just(Kind.SET), KEYS, st.binary(max_size=2000)),
    st.builds(Request, st.just(Kind.GET), KEYS, timeout_ms=st.integers(0, 10**9)),
    st.builds(
        Request,
        st.just(Kind.JOIN),
        KEYS,
        st.binary(max_size=2000),
        st.integers(1, frames.MAX_SIZE),
        st.integers(0, 10**9),
    ),
)
REPLIES = st.builds(
    Reply,
    st.sampled_from(Status),
    st.binary(max_size=2000),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)


def feed_all(reader, data: bytes, pieces):
    """Feeds ``data`` in pieces of at most those sizes; returns what it gave and what is left."""
    at = 0
    sizes = iter(pieces)
    while at < len(data):
        step = min(reader.need, next(sizes, 1 << 30), len(data) - at)
        message = reader.feed(data[at : at + step])
        at += step
        if message is not None:
            return message, data[at:]
    return None, b""


PIECES = st.lists(st.integers(1, 30), max_size=50)


@given(REQUESTS, PIECES)
def test_a_request_survives_the_wire_in_any_pieces(request, pieces):
    wire = b"".join(frames.encode_request(request))
    assert feed_all(frames.RequestReader(), wire, pieces) == (request, b"")


@given(REPLIES, PIECES)
def test_a_reply_survives_the_wire_in_any_pieces(reply, pieces):
    wire = b"".join(frames.encode_reply(reply))
    assert feed_all(frames.ReplyReader(), wire, pieces) == (reply, b"")


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_the_payloads_of_a_round_survive(payloads):
    assert frames.unpack_payloads(frames.pack_payloads(payloads), len(payloads)) == payloads


@given(st.binary(max_size=200), st.integers(0, 70))
def test_random_payload_bytes_are_refused_or_give_exactly_that_many(value, count):
    try:
        payloads = frames.unpack_payloads(value, count)
    except FrameError:
        return
    assert frames.pack_payloads(payloads) == value and len(payloads) == count


@given(st.binary(max_size=400), PIECES, st.sampled_from([frames.RequestReader, frames.ReplyReader]))
def test_random_bytes_give_a_frame_error_or_a_message_within_bounds(data, pieces, reader_class):
    try:
        message, _ = feed_all(reader_class(), data, pieces)
    except FrameError:
        return
    assert message is None or len(message.value) <= len(data)


@given(REQUESTS, st.data())
def test_a_flipped_byte_never_gets_further_than_a_frame_error(request, data):
    wire = bytearray(b"".join(frames.encode_request(request)))
    wire[data.draw(st.integers(0, len(wire) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        feed_all(frames.RequestReader(), bytes(wire), [])
    except FrameError:
        return


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("!BBHIQQ", Kind.GET, 1, 0, 0, 0, 1),  # a value where none belongs
        struct.pack("!BBHIQQ", Kind.JOIN, 1, 0, 2, 0, frames.MAX_PAYLOAD_BYTES + 1),
        struct.pack("!BBHIQQ", Kind.JOIN, 1, 0, 0, 0, 0),
        struct.pack("!BBHIQQ", Kind.JOIN, 1, 0, frames.MAX_SIZE + 1, 0, 0),
        struct.pack("!BBHIQQ", Kind.SET, 1, 0, 0, 0, frames.MAX_VALUE_BYTES + 1),
        struct.pack("!BBHIQQ", Kind.SET, 0, 0, 0, 0, 1),
        struct.pack("!BBHIQQ", Kind.SET, 1, 7, 0, 0, 1),
        struct.pack("!BBHIQQ", Kind.GET, 1, 0, 0, frames.MAX_TIMEOUT_MS + 1, 0),
        struct.pack("!BBHIQQ", 9, 1, 0, 0, 0, 0),
    ],
)
def test_a_head_out_of_bounds_is_refused_before_its_body(head):
    with pytest.raises(FrameError):
        frames.RequestReader().feed(head)


def test_what_is_out_of_bounds_is_not_encoded():
    with pytest.raises(ValueError, match="key"):
        frames.encode_request(Request(Kind.GET, ""))
    with pytest.raises(ValueError, match="key"):
        frames.encode_request(Request(Kind.GET, "ä" * 200))
    with pytest.raises(ValueError, match="1048577 bytes"):
        frames.encode_request(Request(Kind.JOIN, "r", bytes(frames.MAX_PAYLOAD_BYTES + 1), 2))
    with pytest.raises(ValueError, match="ranks"):
        frames.encode_request(Request(Kind.JOIN, "r", b"", frames.MAX_SIZE + 1))
