"""Prefetching gives the same batches as a plain loop, and no thread outlives the loader."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.data import data_loader_base as module


class Numbers(BaseDataLoader):
    """Epoch k has the batches (k, 0), (k, 1), ..."""

    def __init__(self, length: int, fail_at: tuple[int, int] | None = None) -> None:
        self.length, self.fail_at, self.epoch = length, fail_at, -1
        self.made = threading.Semaphore(0)

    def __len__(self) -> int:
        return self.length

    def _iterate(self) -> Iterator[Any]:
        self.epoch += 1
        for index in range(self.length):
            if (self.epoch, index) == self.fail_at:
                raise OSError("a bad disk")
            self.made.release()
            yield self.epoch, index

    def _process_batch(self, batch: Any) -> Any:
        return (*batch, threading.current_thread() is threading.main_thread())


class Loader(AsyncDataLoaderMixin, Numbers):
    pass


def epoch(number: int, length: int) -> list[Any]:
    return [(number, index, True) for index in range(length)]


SIZES = [0, 1, 2, 64]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_the_base_leaves_two_methods_to_define() -> None:
    bare = BaseDataLoader()
    for use in (len, list):
        with pytest.raises(NotImplementedError, match="BaseDataLoader defines"):
            use(bare)  # type: ignore[operator]
    assert list(Numbers(2)) == epoch(0, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, 5])
def test_each_loop_is_one_epoch_in_order(size: int, length: int) -> None:
    loader = Loader(size, False, length)
    for number in range(4):
        assert list(loader) == epoch(number, length)
    assert len(loader) == length
    assert loader.started == (size > 0)
    loader.close_async_loader()
    loader.close_async_loader()
    assert not loader.started


def test_batches_are_made_ahead_also_of_the_next_epoch() -> None:
    loader = Loader(async_loader_queue_size=4, length=2)
    batches = iter(loader)
    assert next(batches) == (0, 0, True)
    for _ in range(4):  # no more than one has been taken out
        assert loader.made.acquire(timeout=30)
    assert list(batches) == [(0, 1, True)]
    assert list(loader) == epoch(1, 2)
    loader.close_async_loader()


@pytest.mark.parametrize("size", SIZES)
def test_an_error_comes_after_the_batches_before_it(size: int) -> None:
    loader = Loader(size, length=3, fail_at=(1, 2))
    assert list(loader) == epoch(0, 3)
    seen = []
    with pytest.raises(OSError, match="a bad disk"):
        for batch in loader:
            seen.append(batch)
    assert seen == epoch(1, 3)[:2]
    assert not loader.started
    assert list(loader) == epoch(2, 3)  # and the loader can be used again
    loader.close_async_loader()


@pytest.mark.parametrize("size", SIZES)
def test_a_loop_left_early_ends_the_thread_and_the_next_begins_anew(size: int) -> None:
    loader = Loader(size, length=100)
    for batch in loader:
        if batch[1] == 3:
            break
    assert not loader.started
    (number,) = {batch[0] for batch in loader}
    assert number > 0
    assert [batch[1] for batch in loader] == list(range(100))
    loader.close_async_loader()


@pytest.mark.parametrize("size", SIZES[1:])
def test_closing_never_hangs_at_any_moment(size: int) -> None:
    Loader(size, length=3).close_async_loader()  # never started
    for taken in range(1, 6):
        loader = Loader(size, length=3)
        batches = iter(loader)
        list(itertools.islice(batches, taken))
        loader.close_async_loader()
        assert not loader.started
        assert list(batches) == []
        assert len({batch[0] for batch in loader}) == 1
        loader.close_async_loader()


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_loop_that_waits_ends_when_another_thread_closes(size: int) -> None:
    class Slow(Loader):
        def _iterate(self) -> Iterator[Any]:
            yield from super()._iterate()
            self.finished_event.wait(30)

    loader = Slow(size, length=1)
    batches = iter(loader)
    assert next(batches) == (0, 0, True)
    closer = threading.Timer(0, loader.close_async_loader)
    closer.start()
    assert list(batches) == []
    closer.join(30)


def test_a_second_loop_takes_over() -> None:
    loader = Loader(2, length=3)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second)[1] == 0
    with pytest.raises(RuntimeError, match="another loop"):
        list(first)
    assert [batch[1] for batch in second] == [1, 2]
    loader.close_async_loader()


def test_a_batch_that_takes_for_ever_does_not_hold_up_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.01)
    release = threading.Event()

    class Stuck(Loader):
        def _iterate(self) -> Iterator[Any]:
            yield from super()._iterate()
            release.wait(30)
            yield 0, 1

    loader = Stuck(1, True, length=1)
    with caplog.at_level(logging.INFO, "horovod"):
        next(iter(loader))  # left early
    assert "still makes a batch" in caplog.text
    assert "thread started" in caplog.text
    release.set()
    for thread in threading.enumerate():
        if thread.name == "horovod data loader":
            thread.join(30)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Loader(-1, length=1)
