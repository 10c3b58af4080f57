"""Sends the gradients of a bucket and writes back what comes; must not know windows or hooks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from horovod.common import ops
from horovod.common.compression import NoneCompressor
from horovod.common.ops import Call, ReduceOp
from horovod.common.process_sets import ProcessSet
from horovod.torch.ops import Compressing
from horovod.torch.sparse import sparse_allreduce_async
from horovod.torch.views import IN_PLACE, UNCOUNTED, Staged, written
from horovod.torch.weights import Weights
from horovod.torch.window import DENSE, Bucket, Slot, check_untouched


@dataclass(frozen=True)
class Options:
    """How a set of gradients is reduced; the arguments of ``DistributedOptimizer``."""

    compression: Compressing
    passes: int
    op: ReduceOp
    predivide_factor: float
    grouping: int | tuple[tuple[str, ...], ...] | None
    """Number of buckets, or the names in each; None: every parameter goes by itself."""
    sparse_as_dense: bool
    skip_unused: bool
    process_set: ProcessSet

    def reduction(self, weighted: bool) -> dict[str, Any]:
        """What the engine is asked for; weighted sums are divided by their weights later."""
        op = ReduceOp.Sum if weighted else self.op
        factor = self.predivide_factor
        return {"reduce_op": op, "prescale": 1.0 / factor, "postscale": factor}


def start(
    bucket: Bucket, prefix: str, options: Options, weighted: bool, carried: Weights | None
) -> None:
    """Sends a bucket's gradients; a missing one counts as zeros.

    Args:
        bucket: gets the gradients' slots in `sent`, and what waits for them in `flight`.
        prefix: comes before the name, which is that of the first parameter.
        options: see there.
        weighted: the gradients are weighted.
        carried: weights whose sum travels along.
    """
    for slot in bucket.slots:
        slot.note()
        missing = slot.gradient is None and slot.early is None
        # A parameter frozen since stays without, as in plain torch.
        if missing and slot.parameter.requires_grad and not options.skip_unused:
            slot.parameter.grad = _zeros(slot)
            slot.note()
    bucket.sent = [slot for slot in bucket.slots if not slot.unused]
    if not bucket.sent:
        return
    name = prefix + bucket.slots[0].name
    reduction = options.reduction(weighted)
    if bucket.sent[0].layout > DENSE and not options.sparse_as_dense:
        _start_sparse(bucket, name, options.process_set, reduction["reduce_op"])
    else:
        _start_dense(bucket, name, options, reduction, carried)


def _zeros(slot: Slot) -> torch.Tensor:
    if slot.layout <= DENSE:
        return torch.zeros_like(slot.parameter)
    shape = slot.parameter.shape
    return torch.sparse_coo_tensor(
        torch.empty(slot.layout, 0, dtype=torch.int64),
        torch.empty(0, *shape[slot.layout :], dtype=slot.parameter.dtype),
        shape,
        device=slot.parameter.device,
        is_coalesced=True,
        check_invariants=False,
    )


def _start_dense(
    bucket: Bucket,
    name: str,
    options: Options,
    reduction: dict[str, Any],
    carried: Weights | None,
) -> None:
    slots, grouped = bucket.sent, len(bucket.slots) > 1
    plain = (
        None if carried is not None or options.compression is not NoneCompressor else _as_is(slots)
    )
    if plain is not None:
        tensors = plain if grouped else plain[0]
        kind, members = ops.ALLREDUCE, options.process_set
        handle = ops.start(UNCOUNTED, kind, tensors, name, members, grouped, **reduction)
        if handle is not None:
            bucket.flight = partial(_land_plain, handle, slots, plain)
            return
    with Call(ops.ALLREDUCE, name, options.process_set, grouped=grouped) as call:
        packed = [slot.compressor.compress(_dense(slot)) for slot in slots]
        staged = [IN_PLACE.stage(tensor) for tensor, _ in packed]
        if carried is not None:
            staged.append(IN_PLACE.stage(carried.start()))
        for one in staged:  # all copies to the host have been started
            one.ready()
        handle = call.submit([one.view for one in staged], _nothing, keep=staged, **reduction)
    bucket.flight = partial(_land_dense, handle, slots, staged, packed)


def _nothing(result: Any) -> None:
    """What in-place calls give beyond what they have written."""


def _land_plain(handle: int, slots: list[Slot], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    ops.synchronize(handle)
    check_untouched(slots)
    written(*tensors)
    return tensors


def _land_dense(
    handle: int, slots: list[Slot], staged: list[Staged], packed: list[tuple[torch.Tensor, Any]]
) -> list[torch.Tensor]:
    ops.synchronize(handle)
    check_untouched(slots)
    arrived = [one.finish(None, i) for i, one in enumerate(staged)]
    return [
        slot.compressor.decompress(tensor, context)
        for slot, tensor, (_, context) in zip(slots, arrived, packed, strict=False)
    ]


def _as_is(slots: list[Slot]) -> list[torch.Tensor] | None:
    """What travels, if none of it has to be made first."""
    gradients: list[torch.Tensor] = []
    for slot in slots:
        gradient = slot.gradient if slot.early is None else slot.early
        if gradient is None or gradient.layout is not torch.strided:
            return None
        gradients.append(gradient)
    return gradients


def _dense(slot: Slot) -> torch.Tensor:
    gradient = slot.early if slot.early is not None else slot.gradient
    if gradient is None:
        return torch.zeros_like(slot.parameter)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _start_sparse(bucket: Bucket, name: str, process_set: ProcessSet, op: ReduceOp) -> None:
    (slot,) = bucket.sent
    gradient = slot.parameter.grad
    if gradient is None:
        gradient = _zeros(slot)
    elif gradient.layout is torch.strided:
        gradient = gradient.to_sparse(slot.layout)
    finish = sparse_allreduce_async(gradient, name, op, process_set)

    def flight() -> list[torch.Tensor]:
        reduced = finish()
        check_untouched([slot])
        return [reduced.coalesce()]

    bucket.flight = flight


def land(bucket: Bucket, options: Options) -> None:
    """Waits for a bucket and writes the reduced gradients where the optimizer looks.

    To be called without autograd.
    """
    assert bucket.flight is not None
    flight, bucket.flight = bucket.flight, None
    for slot, reduced in zip(bucket.sent, flight(), strict=True):
        if slot.early is not None and not slot.arrived:
            raise RuntimeError(
                f"gradient of {slot.name} was sent from inside a compiled backward pass, and "
                f"then not accumulated: use torch.autograd.grad() without hvd.overlap()"
            )
        _deliver(slot, reduced, options.skip_unused)
        slot.note()


def _deliver(slot: Slot, reduced: torch.Tensor, skip_unused: bool) -> None:
    parameter, gradient = slot.parameter, slot.parameter.grad
    if gradient is None and not (skip_unused and parameter.requires_grad):
        return
    if slot.layout > DENSE and reduced.layout is torch.strided:
        reduced = reduced.to_sparse(slot.layout)
    if reduced is gradient:
        return
    if gradient is None or torch.strided not in {gradient.layout, reduced.layout}:
        parameter.grad = reduced.to(parameter.dtype)
    elif gradient.layout is not reduced.layout:
        parameter.grad = reduced.to(gradient.dtype)
    else:
        gradient.copy_(reduced)
