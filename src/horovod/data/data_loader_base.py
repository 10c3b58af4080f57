"""Loops over batches, and loops that a thread runs ahead of; must not know what a batch is."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

_CLOSE_S = 10.0  # for a batch that is being made when the loader is closed
_log = logging.getLogger("horovod")


class BaseDataLoader:
    """What a loader defines: ``__len__`` and ``_iterate``. Each ``for`` loop is one epoch."""

    def __len__(self) -> int:
        """How many batches an epoch has."""
        raise NotImplementedError(f"{type(self).__name__} defines __len__()")

    def _iterate(self) -> Iterator[Any]:
        """The batches of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} defines _iterate()")

    def __iter__(self) -> Iterator[Any]:
        """The processed batches of one epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """What is done to a batch before the loop gets it; trainers replace it."""
        return batch


if TYPE_CHECKING:
    _Loader = BaseDataLoader
else:
    _Loader = object  # the loader comes from the other bases


class _End(NamedTuple):
    """Stands in the queue for the end of an epoch, or of everything because of an error."""

    error: BaseException | None = None


class AsyncDataLoaderMixin(_Loader):
    """Lets a thread make batches ahead of the loop.

    It stands before the loader among the bases::

        class Loader(AsyncDataLoaderMixin, MyLoader): ...

    The thread starts with the first loop and runs on into the next epoch while the batches of this
    one are used up. Batches are made on the thread and processed in the loop. An exception in
    ``_iterate`` is raised in the loop after the batches before it. Whoever leaves a loop early
    gives up that epoch: the next loop begins a new one. One loop runs at a time.

    Args:
        async_loader_queue_size: how many batches may be ready; 0 makes them in the loop, without a
            thread.
        debug_data_loader: logs the starts and ends of the thread.
        args: of the loader's own constructor.
        kwargs: of the loader's own constructor.

    Raises:
        ValueError: the size is negative.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size must be 0 or more, not {async_loader_queue_size}"
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._prepare()
        super().__init__(*args, **kwargs)

    def _prepare(self) -> None:
        """Makes a thread, not started, with a queue and an event that no earlier one knows."""
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(self.async_loader_queue_size)
        self.thread = threading.Thread(
            target=self._produce,
            args=(self.queue, self.finished_event),
            name="horovod data loader",
            daemon=True,
        )
        self.started = False
        self._looping = False

    def close_async_loader(self) -> None:
        """Ends the thread; a loop that goes on ends too, and a new loop starts a new thread.

        Blocks until the batch that is being made is done, 10 s at most. Any thread may call it.
        """
        self._stop(_End())

    def _stop(self, last: _End) -> None:
        """Ends the thread; `last` is what a loop that still waits gets."""
        batches, thread, started = self.queue, self.thread, self.started
        self.finished_event.set()
        self._prepare()
        if not started:
            return
        # The thread looks at the event before each batch: it puts one more at most.
        _drain(batches)
        if thread is not threading.current_thread():
            thread.join(_CLOSE_S)
        if thread.is_alive():
            _log.warning("the data loader's thread still makes a batch; it ends after that")
        _drain(batches)
        batches.put_nowait(last)
        self._debug("closed")

    def __iter__(self) -> Iterator[Any]:
        """The processed batches of one epoch.

        Raises:
            RuntimeError: another loop over this loader has begun since.
        """
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()
            return
        if self._looping:
            self._stop(_End(RuntimeError("another loop over this data loader has begun")))
        if not self.started:
            self.started = True
            self.thread.start()
            self._debug("started")
        batches = self.queue
        self._looping = True
        try:
            while not isinstance(batch := batches.get(), _End):
                yield self._process_batch(batch)
            if batch.error is not None:
                raise batch.error
            if batches is self.queue:
                self._looping = False
        finally:
            if batches is self.queue and self._looping:  # left early, or failed
                self._stop(_End())

    def _produce(self, batches: queue.Queue[Any], finished: threading.Event) -> None:
        """Runs on the thread: epoch after epoch."""
        try:
            while not finished.is_set():
                for batch in self._iterate():
                    if finished.is_set():
                        return
                    batches.put(batch)
                if not finished.is_set():
                    batches.put(_End())
        except BaseException as error:  # whatever a user's loader raises belongs to the loop
            if not finished.is_set():
                batches.put(_End(error))

    def _debug(self, what: str) -> None:
        if self.debug_data_loader:
            _log.info("data loader %s: thread %s", type(self).__name__, what)


def _drain(batches: queue.Queue[Any]) -> None:
    try:
        while True:
            batches.get_nowait()
    except queue.Empty:
        return
