"""Unix stream sockets: long paths, patience, passed descriptors; knows no protocol.

Python makes every descriptor close-on-exec; what arrives by SCM_RIGHTS is made so here.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PATH_LIMIT_BYTES = 107  # sun_path has 108 bytes with the terminating zero
_RETRY_S = 0.01


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Gives a name for ``path`` that fits into a socket address, however long the path is."""
    if len(os.fsencode(path)) <= _PATH_LIMIT_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path, backlog: int) -> socket.socket:
    """Binds a non-blocking listening socket at ``path``, which must not exist."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with _address(path) as address:
            sock.bind(address)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(path: Path, deadline: float) -> socket.socket:
    """Connects to the socket at ``path``; waits, up to the monotonic deadline, for a full backlog.

    Raises:
        OSError: there is nobody, or no descriptor is left, or (TimeoutError) the deadline passed.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                with _address(path) as address:
                    sock.connect(address)
                return sock
            except BlockingIOError:  # the listener's backlog is full
                if time.monotonic() >= deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "nobody accepts", str(path)) from None
                time.sleep(_RETRY_S)
    except BaseException:
        sock.close()
        raise


def peer_pid(sock: socket.socket) -> int:
    """The process id of the other end, as the kernel recorded it when the two were connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def send_descriptors(sock: socket.socket, data: bytes, descriptors: Sequence[int]) -> int:
    """Sends ``data`` with the descriptors attached to its first byte; returns the bytes sent."""
    rights = array.array("i", descriptors)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_descriptors(
    sock: socket.socket, count_bytes: int, count: int
) -> tuple[bytes, list[int]]:
    """Receives at most ``count_bytes`` bytes and what descriptors come with them.

    The caller owns the descriptors, which are close-on-exec. More than ``count`` of them, or
    descriptors that the kernel could not deliver, are an error.

    Raises:
        OSError: the socket failed, or (EMFILE) this process has no room for the descriptors.
    """
    room = socket.CMSG_SPACE(count * array.array("i").itemsize)
    data, control, flags, _ = sock.recvmsg(count_bytes, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            usable = len(payload) - len(payload) % descriptors.itemsize
            descriptors.frombytes(payload[:usable])
    if flags & socket.MSG_CTRUNC or len(descriptors) > count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, "descriptors sent by a peer could not be received")
    return data, list(descriptors)
