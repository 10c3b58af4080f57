"""Writes the library's log records where and how users expect them; knows nobody who logs.

One line a record: ``[YYYY-MM-DD HH:MM:SS.uuuuuu: L file:line] [rank]: text`` with L one of T, D, I,
W, E, F; warnings and worse on stderr, the rest on stdout.
"""

from __future__ import annotations

import datetime
import logging
import sys

LOGGER = logging.getLogger("horovod")
TRACE = 5

_LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_PERIOD_S = 60.0
_LETTERS = ((50, "F"), (40, "E"), (30, "W"), (20, "I"), (10, "D"), (0, "T"))


class _Formatter(logging.Formatter):
    def __init__(self, rank: int, hide_time: bool) -> None:
        super().__init__()
        self._rank = rank
        self._hide_time = hide_time

    def format(self, record: logging.LogRecord) -> str:
        letter = next(letter for level, letter in _LETTERS if record.levelno >= level)
        moment = datetime.datetime.fromtimestamp(record.created)
        when = "" if self._hide_time else f"{moment:%Y-%m-%d %H:%M:%S.%f}: "
        head = f"[{when}{letter} {record.filename}:{record.lineno}] [{self._rank}]: "
        text = head + record.getMessage()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Handler(logging.Handler):
    """Writes to whatever ``sys.stdout`` and ``sys.stderr`` are at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            if stream is not None:
                stream.write(self.format(record) + "\n")
                stream.flush()
        except Exception:  # logging's own rule: a broken stream must not break the program
            self.handleError(record)


class Rarely:
    """Lets the first log line through, then at most one a minute: for what strangers can cause."""

    def __init__(self) -> None:
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Whether a line may be written at this monotonic time; if so, it counts as written."""
        if now < self._next:
            return False
        self._next = now + _PERIOD_S
        return True


def configure(level: str, hide_time: bool, rank: int) -> None:
    """Sets the logger's level and layout. Handlers that the user gave the logger are left alone.

    Args:
        level: trace, debug, info, warning, error or fatal.
        hide_time: leave the time out of every line.
        rank: which process says it.
    """
    LOGGER.setLevel(_LEVELS[level])
    ours = [handler for handler in LOGGER.handlers if isinstance(handler, _Handler)]
    if not LOGGER.handlers:
        ours = [_Handler()]
        LOGGER.addHandler(ours[0])
        LOGGER.propagate = False
    for handler in ours:
        handler.setFormatter(_Formatter(rank, hide_time))
