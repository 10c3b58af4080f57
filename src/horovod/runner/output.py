"""Forwards what workers write, line by line; knows bytes and ranks, not processes or jobs."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

OPEN_LINE_BYTES = 1 << 20  # a longer line is forwarded in pieces
BACKLOG_BYTES = 4 << 20  # more than this waiting for a console stops the reading of workers


class LinePrefixer:
    r"""Puts ``[rank]<stream>:`` before each line, ended by ``\n``, ``\r`` or nothing.

    Bytes pass unchanged, also those that are no UTF-8; nothing is cut inside a character because
    nothing is cut inside a line.

    Args:
        rank: the rank.
        stream: ``stdout`` or ``stderr``.
        stamp: returns the text to begin each line with; None for none.
    """

    def __init__(self, rank: int, stream: str, stamp: Callable[[], str] | None = None) -> None:
        self._prefix = f"[{rank}]<{stream}>:".encode()
        self._stamp = stamp
        self._open = bytearray()
        self._continued = False  # the beginning of the open line is out already
        self._after_return = False

    def feed(self, data: bytes) -> bytes:
        """Returns the lines that ``data`` completes."""
        if not data:
            return b""
        head = b""
        if self._after_return and data[:1] == b"\n":  # the second half of a \r\n
            head, data = b"\n", data[1:]
        if not data:
            self._after_return = False
            return head
        self._after_return = data.endswith(b"\r")
        # Only what is new is looked at: a progress bar makes one long line of many small pieces.
        lines = data.splitlines(keepends=True)
        rest = b"" if data.endswith((b"\n", b"\r")) else lines.pop()
        out = [head]
        for line in lines:
            out += (self._beginning(), bytes(self._open), line)
            self._open.clear()
            self._continued = False
        self._open += rest
        if len(self._open) > OPEN_LINE_BYTES:
            out += (self._beginning(), bytes(self._open))
            self._open = bytearray()
            self._continued = True
        return b"".join(out)

    def finish(self) -> bytes:
        """Returns the last line if it had no end, with one."""
        rest, self._open = bytes(self._open), bytearray()
        if rest:
            return self._beginning() + rest + b"\n"
        return b"\n" if self._continued else b""

    def _beginning(self) -> bytes:
        if self._continued:
            return b""
        stamp = self._stamp().encode() if self._stamp else b""
        return stamp + self._prefix


class Tail:
    """The last bytes of a stream."""

    def __init__(self, limit_bytes: int = 16 << 10) -> None:
        self._limit = limit_bytes
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Adds ``data``."""
        self._data = (self._data + data)[-self._limit :]

    @property
    def data(self) -> bytes:
        """What is kept."""
        return self._data


def descriptor_writer(descriptor: int) -> Callable[[bytes], None]:
    """A function that writes all bytes to a descriptor, also one that does not block."""

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()

    return write


def stream_writer(stream: TextIO | None) -> Callable[[bytes], None]:
    """A function that writes bytes to where ``stream`` goes: its descriptor, else itself.

    A notebook's stream has no descriptor; it gets text.
    """
    if stream is None:
        raise OSError("it is closed")
    try:
        stream.flush()
        return descriptor_writer(stream.fileno())
    except (AttributeError, ValueError, OSError):  # io.UnsupportedOperation is the last two

        def write(data: bytes) -> None:
            stream.write(data.decode("utf-8", "replace"))
            stream.flush()

        return write


class Console:
    """Writes to one stream from a thread of its own, so that a slow reader stops nobody else.

    Args:
        name: ``stdout`` or ``stderr``, for messages.
        stream: the stream.
        wake: called when a backlog has gone.
        broken: called once with the reason if the stream takes no more; later output is dropped.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None,
        wake: Callable[[], None],
        broken: Callable[[str, str], None],
    ) -> None:
        self._name = name
        self._wake = wake
        self._broken_callback = broken
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._broken = False
        self._closed = False
        self._finished = False
        try:
            self._write = stream_writer(stream)
        except OSError as error:
            self._break(error)
        self._thread = threading.Thread(target=self._run, name=f"horovod-{name}", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much waits that workers should not be read from."""
        return self._waiting_bytes > BACKLOG_BYTES

    def put(self, data: bytes) -> None:
        """Hands ``data`` to the thread; never blocks."""
        if not data or self._broken:
            return
        with self._changed:
            self._queue.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify_all()

    def close(self) -> None:
        """Lets the thread end once all is written; then :attr:`done` is true. Never blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def done(self) -> bool:
        """Whether the console was closed and all is written."""
        return self._finished

    def _break(self, error: Exception) -> None:
        self._broken = True
        self._queue.clear()
        self._waiting_bytes = 0
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self._broken_callback(self._name, text)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    self._finished = True
                    break
                data = b"".join(self._queue)
                self._queue.clear()
            try:
                if not self._broken:
                    self._write(data)
            except (OSError, ValueError) as error:  # ValueError: a stream object was closed
                self._break(error)
            with self._changed:
                was_full = self.full
                self._waiting_bytes = max(0, self._waiting_bytes - len(data))
                relieved = was_full and not self.full
            if relieved or self._broken:
                self._wake()
        self._wake()


class RankFiles:
    """The files ``DIR/rank.<r>/stdout`` and ``stderr`` of one rank.

    Args:
        directory: DIR, made with its parents.
        rank: the rank.
        size: number of ranks, which decides how many digits the name has.
        broken: called once, with file and reason, if a file takes no more.

    Raises:
        OSError: a directory or file can't be made.
    """

    def __init__(
        self, directory: Path, rank: int, size: int, broken: Callable[[str, str], None]
    ) -> None:
        folder = directory / f"rank.{rank:0{len(str(size - 1))}d}"
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, BinaryIO] = {}
        self._broken = broken
        for stream in ("stdout", "stderr"):
            self._files[stream] = open(folder / stream, "wb", buffering=0)  # noqa: SIM115

    def write(self, stream: str, data: bytes) -> None:
        """Appends ``data``, which holds whole lines."""
        file = self._files.get(stream)
        if file is None or not data:
            return
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) or 0 :]
        except OSError as error:
            self._files.pop(stream)
            self._broken(file.name, error.strerror or str(error))
            file.close()

    def close(self) -> None:
        """Closes both files."""
        for file in self._files.values():
            file.close()


def asctime() -> str:
    """The time of day as lines are stamped with it."""
    return time.asctime()
