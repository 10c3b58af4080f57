"""Handles, errors and announcements of `ops`, against engines that do as the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from horovod.common import basics, objects, ops, process_sets
from horovod.common.exceptions import MismatchError, ShutdownError
from horovod.common.process_sets import global_process_set


class FakeEngine:
    """Gives each call the next handle; `results` decides what it comes to, `error` what fails."""

    def __init__(self) -> None:
        self.handles = 0
        self.finishes: dict[int, Callable[[object], object]] = {}
        self.done = threading.Event()
        self.waited_for = threading.Event()
        self.results: dict[int, SimpleNamespace] = {}
        self.error: Exception | None = None
        self.rejected: list[tuple[str, str]] = []

    def submit(self, *arguments: object) -> int:
        if self.error is not None:
            raise self.error
        self.handles += 1
        finish = arguments[-1]
        self.finishes[self.handles] = finish if callable(finish) else lambda result: result
        return self.handles

    def start(self, *arguments: object) -> None:
        """It can read no tensor."""
        if self.error is not None:
            raise self.error

    def reject(self, kind: int, name: str, process_set: int, text: str) -> None:
        name.encode(), text.encode()
        self.rejected.append((name, text))

    def remove_process_set(self, number: int, site: int) -> int:
        return self.submit(None)

    def process_sets(self) -> dict[int, list[int]]:
        return {0: [0, 1], 3: [1]}

    def add_site(self, text: str) -> int:
        return 1

    def finish(self, handle: int) -> object:
        self.waited_for.set()
        assert self.done.wait(5)
        if handle not in self.results:
            return None
        result = self.results.pop(handle)
        if result.kind:
            raise basics.Failure(result.kind, result.text, result.rank, "allreduce.x")
        return self.finishes[handle](result)


def result(kind: int = 0, text: str = "", value: int = 0) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, text=text, rank=-1, value=value)


@pytest.fixture
def start(monkeypatch):
    """Lets a fake engine run, as after init(); ends it at the end of the test."""

    def run(engine: FakeEngine | None) -> FakeEngine | None:
        world = None
        if engine is not None:
            settings = SimpleNamespace(rank=0, size=2)
            wires = SimpleNamespace(names=["here pid 1", "there pid 2"])
            world = basics._World(settings, engine, None, wires)
        monkeypatch.setattr(basics._runtime, "world", world)
        return engine

    return run


def submit(name: str | None = "x", **options: object) -> int:
    with ops.Call(ops.ALLREDUCE, name, global_process_set) as call:
        return call.submit((), lambda result: result.value, **options)


@pytest.mark.parametrize("kind", [0, 5])
def test_who_waits_across_a_restart_gets_the_result_of_its_own_engine(start, kind):
    old, new = start(FakeEngine()), FakeEngine()
    assert old is not None
    handle = submit()
    outcomes: list[object] = []

    def wait() -> None:
        try:
            outcomes.append(ops.synchronize(handle))
        except ShutdownError as error:
            outcomes.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert old.waited_for.wait(5)
    start(new)
    again = submit()
    assert again == handle  # numbers start again with each engine
    old.results[1] = result(kind, "ended", value=7)
    old.done.set()
    waiter.join(5)
    assert outcomes == [7 if kind == 0 else "ended"]
    new.results[1] = result(value=8)
    new.done.set()
    assert ops.synchronize(again) == 8
    assert ops.synchronize(again) is None


@pytest.mark.parametrize("error", [TypeError("submit(): incompatible"), MemoryError()])
def test_what_the_engine_cannot_read_is_announced(start, error):
    engine = start(FakeEngine())
    assert engine is not None
    engine.error = error
    with pytest.raises(type(error)):
        submit()
    assert [name for name, _ in engine.rejected] == ["allreduce.x"]


def start_at_once(name: str | None) -> int | None:
    form: Any = None
    return ops.start(form, ops.ALLREDUCE, None, name, global_process_set, grouped=False)


@pytest.mark.parametrize(
    "error", [TypeError("start(): incompatible"), RuntimeError("can't allocate"), MemoryError()]
)
def test_what_cannot_be_started_is_left_to_a_call(start, error):
    """Which makes it fail again, and tells the other ranks."""
    engine = start(FakeEngine())
    assert engine is not None
    engine.error = error
    assert start_at_once("x") is None
    assert engine.rejected == []


@pytest.mark.parametrize(("name", "op"), [("x", "allreduce.x"), (None, "allreduce.noname")])
def test_a_start_that_the_engine_refuses_names_the_call(start, name, op):
    engine = start(FakeEngine())
    assert engine is not None
    engine.error = basics.Failure(5, "ended", -1)
    with pytest.raises(ShutdownError) as error:
        start_at_once(name)
    assert error.value.op == op


@pytest.mark.parametrize("error", [ValueError("in flight"), basics.Failure(5, "ended", -1)])
def test_the_engines_own_judgement_is_not_announced_again(start, error):
    engine = start(FakeEngine())
    assert engine is not None
    engine.error = error
    with pytest.raises((ValueError, ShutdownError)):
        submit()
    assert engine.rejected == []


@pytest.mark.parametrize("root", [1 << 40, -(1 << 40)])
def test_a_root_beyond_every_rank_is_a_value_error_that_is_announced(start, root):
    engine = start(FakeEngine())
    assert engine is not None
    with pytest.raises(
        ValueError, match=rf'^\[horovod 0/2\] allreduce "x": there is no rank {root}'
    ):
        submit(root=root)
    assert len(engine.rejected) == 1


def test_a_name_that_is_no_text_is_refused_and_an_error_text_may_be_none(start):
    engine = start(FakeEngine())
    assert engine is not None
    with pytest.raises(ValueError, match="no valid text"):
        submit("\udc80")
    assert engine.rejected == []
    with pytest.raises(OSError), ops.Call(ops.ALLREDUCE, "x", global_process_set):
        raise OSError("no file \udc80")
    assert engine.rejected == [("allreduce.x", "OSError: no file \\udc80")]


def test_a_failed_call_is_told_also_if_another_thread_ends_the_world(start):
    engine = start(FakeEngine())
    with (
        pytest.raises(ValueError, match=r'^\[horovod\] allreduce "x": wrong$'),
        ops.Call(ops.ALLREDUCE, "x", global_process_set),
    ):
        start(None)
        raise ValueError("wrong")
    assert engine is not None and len(engine.rejected) == 1


def test_an_error_has_no_host_if_another_thread_ends_the_world(start, monkeypatch):
    start(FakeEngine())
    assert basics.translated(basics.Failure(3, "lost", 1), "x").host == "there"
    monkeypatch.setattr(basics, "is_initialized", lambda: True)  # what was true a moment ago
    start(None)
    assert basics.translated(basics.Failure(3, "lost", 1), "x").host is None


@pytest.mark.parametrize(
    ("op", "shown", "submitted"),
    [
        ("allreduce.x", 'allreduce "x"', "rank 0: [2], rank 1: [3]"),
        ("allreduce.x", 'allreduce "x"', 'rank 0 said "y": no'),
        ('allreduce.a": "b', 'allreduce "a": "b"', "[2]"),
        ('allreduce."', 'allreduce """', "[2]"),
        ("grouped_allreduce.x", 'allreduce "grouped_allreduce.x"', "[2]"),
        ("allreduce." + "n" * 300, 'allreduce "' + "n" * 200 + '..."', "[2]"),
        ("allreduce.y", 'allreduce "x"', None),
        ("test", "process sets", None),
    ],
)
def test_what_was_submitted_is_cut_out_whatever_the_name(op, shown, submitted):
    text = f"[horovod 0/2] {shown}: {submitted or 'something'}"
    error = basics.translated(basics.Failure(2, text, -1), op)
    assert isinstance(error, MismatchError)
    assert error.submitted == submitted


def test_a_library_that_is_missing_is_an_import_error():
    error = basics.translated(basics.Failure(6, "this CPU has no avx512", -1), "init")
    assert type(error) is ImportError and str(error) == "this CPU has no avx512"


def test_init_raises_the_import_error(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise basics.Failure(6, "this CPU has no avx512", -1)

    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(basics, "_core", SimpleNamespace(Engine=refuse))
    with pytest.raises(ImportError, match="avx512"):
        basics.init()
    assert not basics.is_initialized()


def test_a_removal_that_fails_leaves_the_set_as_it_was(start):
    engine = start(FakeEngine())
    assert engine is not None
    engine.done.set()
    odd = process_sets.ProcessSet([1])
    odd.process_set_id = odd.uid = 3
    engine.results[1] = result(2, "ranks disagree")
    with pytest.raises(MismatchError):
        process_sets.remove_process_set(odd)
    assert odd.process_set_id == 3
    engine.results[2] = result(value=3)
    assert process_sets.remove_process_set(odd) is True
    assert odd.process_set_id is None


@pytest.mark.parametrize("name", [None, "n"])
def test_objects_before_init_are_the_same_error_with_and_without_a_name(name):
    with pytest.raises(ShutdownError, match="init"):
        objects.broadcast_object(1, 0, name, global_process_set)
    with pytest.raises(ShutdownError, match="init"):
        objects.allgather_object(1, name, global_process_set)
