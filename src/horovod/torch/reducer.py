"""Which gradients are reduced when, and how they come back; must not know the optimizer's own step.

A *window* is the backward passes that one step uses. A parameter's hook counts its passes down; at
zero its gradient has *arrived*, and once all of its bucket have, their reduction starts, in place,
while backward goes on. `Reducer.complete` starts what is missing, so that ranks that use different
parameters still make the same calls, and waits for all. If every gradient arrives, the end of the
backward pass completes the window, so that whatever comes next sees reduced gradients.
"""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from horovod.common import basics, ops
from horovod.common.compression import bound
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import ReduceOp
from horovod.torch import flights
from horovod.torch.differentiable import allreduce_
from horovod.torch.flights import Options
from horovod.torch.names import Prefix
from horovod.torch.weights import Weights
from horovod.torch.window import DENSE, UNSEEN, Bucket, Slot


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _fail(error: Exception) -> NoReturn:
    raise error


_numbers = itertools.count()  # of the reducers of this process
_owners: Any = WeakIdKeyDictionary()  # parameter -> weak reference to the one that reduces it


def weight_of(parameter: torch.Tensor | None) -> float | None:
    """What its gradients of this rank count for in the optimizer that reduces it."""
    owner = None if parameter is None else _owners.get(parameter, lambda: None)()
    return None if owner is None else owner.weight


class Reducer:
    """Reduces the gradients of an optimizer's parameters over the ranks of a process set.

    Args:
        names: of each parameter, in the optimizer's order; may grow later.
        prefix: comes before them.
        options: see `Options`.
    """

    def __init__(self, names: dict[torch.Tensor, str], prefix: Prefix, options: Options) -> None:
        self.options = options
        self.names = names
        self.reduced = False  # the window is complete, and its gradients wait for the step
        self.retired = False  # another reducer has the parameters now
        self.paused = False
        self.parameters: list[torch.Tensor] = []
        """All of them, in the order of the optimizer's groups; `start_early` counts in it."""
        self._number = next(_numbers)
        self._prefix = prefix
        self._passes = options.passes
        self._run = ops.run()  # that the handles belong to
        self._drops = 0
        self._warned = False
        self._removers: list[Any] = []
        self._slots: dict[torch.Tensor, Slot] = {}
        self._buckets: list[Bucket] = []
        self._active: list[Slot] = []  # with a hook
        self._open: int | None = None  # expected gradients not yet there; None: none of any kind is
        self._weights = Weights()
        self._carrier: Bucket | None = None  # it takes the weight along
        self._called: str | None = None  # `prefix`, once the window has called something by it
        self._place()

    # ---------------------------------------------------------------------------------------------
    # Parameters

    @property
    def passes(self) -> int:
        """How many backward passes make a window."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        self.restart()

    @property
    def prefix(self) -> str:
        """Comes before every name."""
        return f"{self._prefix}dropped{self._drops}." if self._drops else str(self._prefix)

    def _name_of(self, what: str) -> str:
        """For a call that is of no parameter: other optimizers may be at work in other threads."""
        return f"{self.prefix}{what}.{next(iter(self.names.values()))}"

    def delays(self) -> dict[torch.Tensor, int]:
        """How many more passes each hooked parameter's reduction waits for."""
        return {slot.parameter: slot.passes_left for slot in self._active}

    def in_flight(self) -> dict[torch.Tensor, Any]:
        """What waits for each gradient under way."""
        return {
            slot.parameter: bucket.flight
            for bucket in self._buckets
            if bucket.flight is not None
            for slot in bucket.sent
        }

    def _place(self) -> None:
        """Gives each new parameter its slot and bucket."""
        fresh = [p for p in self.names if p not in self._slots]
        for parameter, bucket in zip(fresh, self._buckets_for(fresh), strict=True):
            name = self.names[parameter]
            # What it keeps is this optimizer's own: the name is never sent.
            compressor = bound(self.options.compression, f"{self._number}.{name}")
            self._slots[parameter] = Slot(parameter, name, bucket, compressor, self._passes)
        self.parameters += fresh

    def _buckets_for(self, fresh: list[torch.Tensor]) -> list[Bucket]:
        grouping = self.options.grouping
        if self._slots or grouping is None:  # those added later go by themselves
            return [Bucket() for _ in fresh]
        if isinstance(grouping, int):
            count, parts = len(fresh), min(grouping, len(fresh))
            buckets = [Bucket() for _ in range(parts)]
            longer = count % parts if parts else 0
            each = count // parts if parts else 0
            sizes = [each + (i < longer) for i in range(parts)]
            return [b for b, size in zip(buckets, sizes, strict=True) for _ in range(size)]
        by_name = {name: b for names in grouping for b in [Bucket()] for name in names}
        return [by_name.get(self.names[p]) or Bucket() for p in fresh]

    def attach(self) -> None:
        """Hooks the parameters that require gradients and have no hook yet, where ranks reduce."""
        if self.retired or not basics.is_initialized():
            return
        several = basics.size() > 1 or self.weight is not None
        if not several or not self.options.process_set.included():
            return
        self._place()
        fresh = [s for s in self._slots.values() if not s.hooked and s.parameter.requires_grad]
        for slot in fresh:
            self._hook(slot)
        if fresh:
            order = {slot: i for i, slot in enumerate(self._slots.values())}
            self._active = [slot for slot in order if slot.hooked]
            for bucket in {slot.bucket: None for slot in fresh}:
                bucket.slots.sort(key=order.__getitem__)
            self._buckets = list({slot.bucket: None for slot in self._active})
        if self.weight is not None:
            me = weakref.ref(self)

            def before() -> None:
                reducer = me()
                if reducer is not None and reducer.dropped():
                    reducer.drop()  # or this pass would count for the window before

            for slot in self._active:
                if slot.parameter.requires_grad:
                    self._weights.watch(slot, before)

    def _hook(self, slot: Slot) -> None:
        owner = _owners.get(slot.parameter, lambda: None)()
        if owner is not None and owner is not self:
            owner._retire()
        me = _owners[slot.parameter] = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            # Refers to no slot: the collector of garbage can't see that the parameter holds this.
            reducer = me()
            if reducer is not None:
                reducer._arrive(reducer._slots[parameter])

        self._removers.append(
            slot.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        )
        slot.hooked = True
        slot.bucket.slots.append(slot)
        slot.bucket.missing += 1
        slot.bucket.dense = False

    def _retire(self) -> None:
        """Another reducer has the parameters now."""
        for remover in self._removers:
            remover.remove()
        self._weights.unwatch()
        self.forget()
        self._active, self._buckets = [], []
        self.retired = True

    # ---------------------------------------------------------------------------------------------
    # The window

    def drop(self) -> None:
        """Starts a new window although no step has used the reduced gradients of this one.

        Names say how often that was, so that a rank that drops what the others step with doesn't
        go on a window apart from them: its calls match none of theirs. A few numbers will do.
        """
        if self.reduced:
            self._drops = (self._drops + 1) % 4
        self.restart()

    def restart(self) -> None:
        """Starts a new window: the step has used the gradients, or they were dropped."""
        self.reduced = False
        self._open = None
        ops.owe_nothing(id(self))
        self._weights.restart()
        for slot in self._active:
            slot.passes_left = self._passes
            slot.arrived = slot.unused = False
            slot.weighed = 0
            slot.early = slot.seen = slot.source = slot.gradient = None
        for bucket in self._buckets:
            bucket.restart()
        self._called = None
        self._choose_carrier()

    def _choose_carrier(self) -> None:
        weighted = reversed(self._buckets) if self.weight is not None else ()
        self._carrier = next((bucket for bucket in weighted if bucket.dense), None)

    def forget(self) -> None:
        """Waits out what is in flight, drops it, and starts a new window."""
        if self.busy() or self.started:
            try:
                self.complete()  # what is in flight elsewhere may wait for what is missing here
            except (RuntimeError, ValueError) as error:
                # Elastic training loads state because of it.
                logging.getLogger("horovod").info("gradients in flight were lost: %s", error)
        self.restart()

    def dropped(self) -> bool:
        """Whether the reduced gradients were taken away, by ``model.zero_grad()`` for example."""
        return self.reduced and all(
            slot.parameter.grad is not slot.gradient
            for slot in self._active
            if slot.gradient is not None
        )

    @property
    def started(self) -> bool:
        """Whether the window's first gradient has arrived and its last one is not reduced."""
        return self._open is not None and not self.reduced

    def busy(self) -> bool:
        """Whether any gradient is under way."""
        self._drop_stale()
        return any(bucket.flight is not None for bucket in self._buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it gradients add up without counting as passes of the window."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _drop_stale(self) -> None:
        """Forgets what an engine before the present one had under way."""
        if self._run != ops.run():
            if any(bucket.flight is not None for bucket in self._buckets):
                self.restart()
            self._run = ops.run()
            self._drops = 0
            self._called = None

    def _arrive(self, slot: Slot) -> None:
        """A backward pass has added to the parameter's gradient."""
        self._check(slot)
        if self.paused:
            return
        slot.passes_left -= 1
        if slot.passes_left > 0:
            return
        slot.compare()
        slot.arrived = True
        if slot.early is not None:
            slot.note()  # its copy is under way
        else:
            self._fill(slot.bucket)
        if self._open is None:
            self._expect()
        if slot.expected:
            slot.expected = False
            self._open = (self._open or 0) - 1
            if self._open == 0:
                self._complete_after_backward()

    def _check(self, slot: Slot) -> None:
        """Raises if the pass came too late, or asks for what cannot be."""
        self._drop_stale()
        if self.reduced and (self.dropped() or self._may_repeat()):
            self.drop()
        late = slot.bucket.flight is not None and (slot.arrived or slot.early is None)
        if late or self.reduced:
            raise AssertionError(
                f"gradient of {slot.name} was computed more than backward_passes_per_step="
                f"{self._passes} times before step() or synchronize(): its reduction has started. "
                f"Raise backward_passes_per_step, use no_sync(), or step more often"
            )
        gradient = slot.parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                f"gradient of {slot.name} requires a gradient: create_graph can't be used"
            )

    def _may_repeat(self) -> bool:
        """Whether reduced gradients can be added to and reduced once more: means of means are."""
        if self.options.op != ReduceOp.Average or self.weight is not None:
            return False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"backward() adds to gradients that were reduced after backward_passes_per_step="
                f"{self._passes} passes and not used by step(): all are reduced again. Raise "
                f"backward_passes_per_step, use no_sync(), or call zero_grad() to save that",
                stacklevel=2,
            )
        return True

    def _expect(self) -> None:
        """At the first arrival of a window: what the end of backward will wait for.

        Not for a parameter that no rank has ever used.
        """
        me = weakref.ref(self)

        def finish() -> None:
            reducer = me()
            if reducer is not None and reducer.started and not in_backward():
                reducer.complete()

        ops.owe(id(self), finish)
        known = any(slot.layout != UNSEEN for slot in self._active)
        self._open = 0
        for slot in self._active:
            slot.expected = slot.parameter.requires_grad and not (known and slot.layout == UNSEEN)
            self._open += slot.expected

    def _complete_after_backward(self) -> None:
        me = weakref.ref(self)

        def complete() -> None:
            reducer = me()
            if reducer is not None:
                reducer.complete()

        torch.autograd.Variable._execution_engine.queue_callback(complete)

    def start_early(self, index: int, gradient: torch.Tensor) -> None:
        """Starts the reduction of a gradient that backward is about to accumulate.

        Compiled backward passes run all hooks at their end; this is called from inside. The
        window's last pass sends a copy, and completion writes it over the accumulated gradient; but
        only if what was seen here in earlier windows was all that was accumulated.

        Args:
            index: the parameter's place in `parameters`.
            gradient: of this pass, of the parameter's shape; not modified.
        """
        slot = self._slots[self.parameters[index]]
        waits = not slot.hooked or self.paused or slot.passes_left > 1 or slot.arrived
        if waits or slot.alone is False:
            return
        self._check(slot)
        if slot.seen is not None:
            slot.alone = False  # a second one in one pass
            return
        if not slot.watched:
            slot.watched = True
            self._removers.append(slot.parameter.register_hook(slot.reach))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            slot.source = gradient.detach() if slot.alone is None else None
            slot.seen = self._weights.weighted(slot, gradient)
            if slot.parameter.grad is not None:
                slot.seen.add_(slot.parameter.grad)
            slot.early = slot.seen.clone() if slot.alone else None
        if slot.early is not None:
            self._fill(slot.bucket)

    def _fill(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        if bucket.missing > 0 or (not bucket.dense and self._undecided(bucket)):
            return
        try:
            self._start(bucket)
        except Exception as error:
            # The other ranks know, and go through the whole window; so does this one, before it
            # raises the error.
            bucket.sent, bucket.flight = [], functools.partial(_fail, error)

    def _undecided(self, bucket: Bucket) -> bool:
        """Whether a gradient is sparse that other ranks may not know to be."""
        unseen = [slot.parameter.grad for slot in bucket.slots if slot.layout == UNSEEN]
        return not self.options.sparse_as_dense and any(
            gradient is not None and gradient.layout is not torch.strided for gradient in unseen
        )

    # ---------------------------------------------------------------------------------------------
    # Completion

    def complete(self) -> None:
        """Starts what is missing and waits until every gradient of the window is reduced.

        Raises:
            HorovodInternalError: ranks disagree about a gradient, or a peer is lost.
            RuntimeError: a gradient was changed while it was being reduced; or another optimizer
                was made over the same parameters.
        """
        if self.retired:
            raise RuntimeError(
                "another DistributedOptimizer was made over the same parameters: use that"
            )
        self._drop_stale()
        self.attach()
        if self._active and not self.reduced:
            with ops.paying():
                self._complete()

    def _complete(self) -> None:
        errors: list[Exception] = []

        def attempt(what: Callable[..., None], *arguments: Any) -> None:
            # The others wait for every name, and every handle is ours to finish: errors come last.
            try:
                what(*arguments)
            except Exception as error:
                errors.append(error)

        if self.options.skip_unused or any(slot.layout == UNSEEN for slot in self._active):
            attempt(self._learn)
        waiting = [bucket for bucket in self._buckets if bucket.flight is None]
        if self.weight is not None:
            self._weights.settle(slot for bucket in waiting for slot in bucket.slots)
        for bucket in waiting:
            attempt(self._start, bucket)
        with torch.no_grad():
            for bucket in self._buckets:
                if bucket.flight is not None:
                    attempt(flights.land, bucket, self.options)
        if self.weight is not None and not errors:
            attempt(self._divide)
        if errors:
            self.restart()
            # What concerns all ranks explains what concerns this one.
            raise next((e for e in errors if isinstance(e, HorovodInternalError)), errors[0])
        self.reduced = True
        ops.owe_nothing(id(self))

    def _learn(self) -> None:
        """Ranks tell each other which gradients they have, and of which layout."""
        seen = torch.zeros(2, len(self._active), dtype=torch.int8)
        for i, slot in enumerate(self._active):
            gradient = slot.early if slot.early is not None else slot.parameter.grad
            if gradient is not None:
                sparse = gradient.layout is not torch.strided
                seen[int(sparse), i] = gradient.sparse_dim() if sparse else 1
        allreduce_(
            seen,
            name=self._name_of("gradients"),
            op=ReduceOp.Max,
            process_set=self.options.process_set,
        )
        for slot, dense, sparse in zip(self._active, *seen.tolist(), strict=True):
            if slot.layout == UNSEEN and (dense or sparse):
                slot.layout = DENSE if dense else sparse
                if slot.layout != DENSE and not self.options.sparse_as_dense:
                    self._separate(slot)
            slot.unused = not (dense or sparse) and (
                self.options.skip_unused or slot.layout == UNSEEN
            )

    def _separate(self, slot: Slot) -> None:
        """A sparse gradient travels by itself, even if its parameter was put into a group."""
        if len(slot.bucket.slots) > 1:
            slot.bucket.slots.remove(slot)
            slot.bucket = Bucket([slot])
            self._buckets.append(slot.bucket)

    def _start(self, bucket: Bucket) -> None:
        weights = None if self.weight is None else self._weights
        carried = weights if bucket is self._carrier else None
        if self._called is None:
            self._called = self.prefix
        flights.start(bucket, self._called, self.options, weights is not None, carried)
        self._run = ops.run()

    def _divide(self) -> None:
        weights = self._weights
        if weights.total is None:  # no bucket took it along
            allreduce_(
                weights.start(),
                name=self._name_of("weight"),
                op=ReduceOp.Sum,
                process_set=self.options.process_set,
            )
        weights.divide(self._active, ops.members(self.options.process_set))

    def mean_of(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over ranks that the window's gradients belong to, of a loss over theirs."""
        share = self._weights.share()
        # A mean over no samples may be NaN.
        mean = loss.clone() if share is None else loss * share if share else torch.zeros_like(loss)
        op = ReduceOp.Average if share is None else ReduceOp.Sum
        allreduce_(mean, name=self._name_of("loss"), op=op, process_set=self.options.process_set)
        return mean

    @property
    def weight(self) -> float | None:
        """What the gradients of this rank's next backward pass count for; None: ranks are equal."""
        return self._weights.current

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if weight is not None:
            weight = float(weight)
            if not 0.0 <= weight < float("inf"):
                raise ValueError(f"weight must be a number of at least 0, not {weight}")
            if self.options.op != ReduceOp.Average:
                raise ValueError(f"weight works with op=Average, not {self.options.op.name}")
        if (weight is None) != (self.weight is None) and self.busy():
            raise RuntimeError("weight was set while gradients are being reduced")
        chosen = (weight is None) == (self.weight is None)
        self._weights.set(weight)
        if not chosen:
            self._choose_carrier()
        self.attach()
