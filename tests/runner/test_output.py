"""Prefixes, consoles that are slow or closed, and files for each rank."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner import output
from horovod.runner.output import Console, LinePrefixer, RankFiles, Tail

P = b"[1]<stdout>:"


def prefixed(*chunks: bytes) -> list[bytes]:
    prefixer = LinePrefixer(1, "stdout")
    return [*(prefixer.feed(chunk) for chunk in chunks), prefixer.finish()]


@pytest.mark.parametrize(
    ("chunks", "result"),
    [
        ([b"a\n"], [P + b"a\n", b""]),
        ([b"a\nb"], [P + b"a\n", P + b"b\n"]),
        ([b"a", b"b\n"], [b"", P + b"ab\n", b""]),
        ([b"10%\r20%\r"], [P + b"10%\r" + P + b"20%\r", b""]),
        ([b"a\r\nb\r\n"], [P + b"a\r\n" + P + b"b\r\n", b""]),
        ([b"a\r", b"\nb\n"], [P + b"a\r", b"\n" + P + b"b\n", b""]),
        ([b"a\r", b"b\r", b"\n"], [P + b"a\r", P + b"b\r", b"\n", b""]),
        ([b"\n\n"], [P + b"\n" + P + b"\n", b""]),
        ([b"\xff\xfe\n"], [P + b"\xff\xfe\n", b""]),
        ([b"\xc3", b"\xa4\n"], [b"", P + b"\xc3\xa4\n", b""]),
        ([b"a\x0bb\x0cc\x85d\n"], [P + b"a\x0bb\x0cc\x85d\n", b""]),
        ([b""], [b"", b""]),
    ],
)
def test_prefixes(chunks: list[bytes], result: list[bytes]) -> None:
    assert prefixed(*chunks) == result


def test_stamps() -> None:
    prefixer = LinePrefixer(0, "stderr", lambda: "Mon Nov 30 15:10:19 2026")
    assert prefixer.feed(b"a\n") == b"Mon Nov 30 15:10:19 2026[0]<stderr>:a\n"


def test_a_line_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "OPEN_LINE_BYTES", 10)
    chunks = [b"x" * 8] * 4
    assert prefixed(*chunks, b"\nb\n") == [
        b"",
        P + b"x" * 16,
        b"",
        b"x" * 16,
        b"\n" + P + b"b\n",
        b"",
    ]
    assert prefixed(b"x" * 11) == [P + b"x" * 11, b"\n"]


def test_a_long_line_of_small_pieces_costs_its_length() -> None:
    prefixer = LinePrefixer(1, "stdout")
    pieces = output.OPEN_LINE_BYTES // 8
    before = time.thread_time()
    for _ in range(pieces):
        assert prefixer.feed(b"=======>") == b""
    assert time.thread_time() - before < 2.0  # seconds; 0.1 on a usual machine
    assert len(prefixer.finish()) == len(P) + 8 * pieces + 1


@given(st.lists(st.text(alphabet="ab\r\n", max_size=6), max_size=8))
def test_cuts_change_nothing_but_when(chunks: list[str]) -> None:
    pieces = [chunk.encode() for chunk in chunks]
    text = b"".join(pieces)
    forwarded = b"".join(prefixed(*pieces))
    assert forwarded == b"".join(prefixed(text))
    bare = forwarded.replace(P, b"")
    assert bare == text + (b"\n" if text and text[-1:] not in b"\r\n" else b"")
    assert forwarded.count(P) == len(re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", text))


def test_tail() -> None:
    tail = Tail(4)
    tail.feed(b"abc")
    tail.feed(b"def")
    assert tail.data == b"cdef"


class Report:
    def __init__(self) -> None:
        self.broken: list[tuple[str, str]] = []
        self.woken = threading.Event()

    def console(self, stream: TextIO | None) -> Console:
        return Console("stdout", stream, self.woken.set, lambda *what: self.broken.append(what))


def finish(console: Console, wait_until: Callable[[Callable[[], bool], float], bool]) -> None:
    console.close()
    assert wait_until(lambda: console.done, 5)


def test_a_stream_without_descriptor_gets_text(wait_until) -> None:
    stream = io.StringIO()
    console = Report().console(stream)
    console.put("a\u00e4".encode() + b"\xff\n")
    finish(console, wait_until)
    assert stream.getvalue() == "a\u00e4\ufffd\n"


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_gets_all(wait_until, blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    report = Report()
    with open(writer, "w") as stream, open(reader, "rb") as source:
        console = report.console(stream)
        data = b"x" * (output.BACKLOG_BYTES + 1)
        console.put(data)
        assert console.full
        received = source.read(len(data))
        assert received == data
        assert report.woken.wait(5)
        assert not console.full
        finish(console, wait_until)
    assert report.broken == []


def test_a_closed_reader_is_told_once(wait_until) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    report = Report()
    with open(writer, "w") as stream:
        console = report.console(stream)
        for _ in range(3):
            console.put(b"x\n")
        finish(console, wait_until)
        console.put(b"x\n")
    assert report.broken == [("stdout", "Broken pipe")]
    assert not console.full


def test_no_stream_at_all(wait_until) -> None:
    report = Report()
    console = report.console(None)
    console.put(b"x\n")
    finish(console, wait_until)
    assert report.broken == [("stdout", "it is closed")]


@pytest.mark.parametrize(
    ("size", "rank", "name"),
    [(1, 0, "0"), (2, 1, "1"), (10, 9, "9"), (11, 9, "09"), (101, 7, "007")],
)
def test_files_of_a_rank(tmp_path: Path, size: int, rank: int, name: str) -> None:
    for _ in range(2):  # the second time they are begun anew
        files = RankFiles(tmp_path / "a" / "b", rank, size, lambda *what: pytest.fail(str(what)))
        files.write("stdout", b"out\n")
        files.write("stderr", b"err\n")
        files.close()
    folder = tmp_path / "a" / "b" / f"rank.{name}"
    assert (folder / "stdout").read_bytes() == b"out\n"
    assert (folder / "stderr").read_bytes() == b"err\n"


def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    folder = tmp_path / "rank.0"
    folder.mkdir()
    (folder / "stdout").symlink_to("/dev/full")
    broken: list[tuple[str, str]] = []
    files = RankFiles(tmp_path, 0, 2, lambda *what: broken.append(what))
    files.write("stdout", b"x\n")
    files.write("stdout", b"x\n")
    files.write("stderr", b"x\n")
    files.close()
    assert broken == [(str(folder / "stdout"), "No space left on device")]
    assert (folder / "stderr").read_bytes() == b"x\n"
