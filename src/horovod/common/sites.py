"""Where in the user's program a call was made; must not know any engine or framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType

MOST = 4096  # places, and files; a program that makes more of them is generating them
_LONGEST = 200  # characters of a path

_passed_over = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep]


class _Files(dict[str, bool]):
    """By file name: whether calls made in it are the user's own."""

    def __missing__(self, name: str) -> bool:
        if len(self) >= MOST:
            self.clear()
        self[name] = users = not any(part in name for part in _passed_over)
        return users


_files = _Files()


def pass_over(*parts: str) -> None:
    """Files whose name contains one of the parts are a framework's, not the user's."""
    _passed_over.extend(parts)
    _files.clear()


class Sites:
    """The numbers under which an engine knows places like ``train.py:12``.

    Args:
        register: makes such a text a number.
    """

    def __init__(self, register: Callable[[str], int]) -> None:
        self._register = register
        # By depth of the stack, code and instruction: the line itself takes long to find, and so
        # does every frame that is looked at. The code is kept so that its address stays its own.
        self._known: dict[tuple[int, int, int], tuple[int, CodeType]] = {}
        # Where the last one was found; hooks and loops find theirs there again. Never 0: here() in
        # its own frame is a cycle, by which an engine would live on until that is collected.
        self._depth = 1

    def here(self) -> int:
        """The number of the innermost line of the user's that is running; 0 if none is."""
        depth = self._depth
        try:
            frame = sys._getframe(depth)
        except ValueError:  # a shorter stack
            return self._search()
        known = self._known.get((depth, id(frame.f_code), frame.f_lasti))
        return self._search() if known is None else known[0]

    def _search(self) -> int:
        depth = 0  # of here()
        frame = sys._getframe(1)
        while not _files[frame.f_code.co_filename]:
            depth += 1
            frame = frame.f_back  # type: ignore[assignment]
            if frame is None:
                return 0
        code = frame.f_code
        key = (depth, id(code), frame.f_lasti)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST:
                return 0
            known = self._register(text(code.co_filename, frame.f_lineno)), code
            self._known[key] = known
        self._depth = depth
        return known[0]


def is_users(file: str) -> bool:
    """Whether a file is the user's own, and no framework's."""
    return _files[file]


def text(file: str, line: int | None) -> str:
    """A place as reports show it, of bounded length."""
    if len(file) > _LONGEST:
        file = "..." + file[-_LONGEST:]
    return f"{file}:{line}".encode("utf-8", "backslashreplace").decode()
