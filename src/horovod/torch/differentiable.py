"""The blocking collectives; those that give new tensors have gradients.

They must not know how data travels. All members of ``process_set`` must make the call, with the
same name; calls without one match in the order they are made. The order of results follows the
ranks of the set, the root is a global rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod.common import ops
from horovod.common.compression import NoneCompressor, bound
from horovod.common.ops import Call, reduce_op, synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import library
from horovod.torch.collectives import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    Collective,
)
from horovod.torch.ops import (
    Average,
    Compressing,
    Tensors,
    broadcast_async_,
    group,
    is_tracing,
    reduce,
)
from horovod.torch.views import IN_PLACE, require_tensor


@dataclass
class _Past:
    """See `collectives.Past`; must not refer to the call, which would keep an engine alive."""

    process_set: ProcessSet
    grouped: bool
    rows: list[int]
    received: Sequence[torch.Tensor] = ()

    def call(self, row: Collective, tensors: Tensors, *arguments: Any) -> Tensors:
        with Call(row.op, None, self.process_set, grouped=self.grouped) as call:
            return _run(row, call, tensors, *arguments)


class _Differentiable(torch.autograd.Function):
    """Any collective, run eagerly."""

    @staticmethod
    def forward(
        ctx: Any, row: Collective, call: Call, arguments: Any, *tensors: torch.Tensor
    ) -> Any:
        outputs = tuple(row.run(call, tensors, *arguments))
        _Differentiable.remember(ctx, row, call, arguments, tensors, outputs)
        return outputs

    @staticmethod
    def remember(
        ctx: Any, row: Collective, call: Call, arguments: Any, tensors: Tensors, outputs: Tensors
    ) -> None:
        ctx.row, ctx.arguments = row, arguments
        ctx.past = _Past(call.process_set, call.grouped, library.rows_of(tensors))
        if row.keeps:
            ctx.save_for_backward(*outputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.past.received = ctx.saved_tensors
        return (None, None, None, *ctx.row.gradient(ctx.past, grads, *ctx.arguments))


class _Transformable(_Differentiable):
    """The same in the form that torch.func needs, which takes longer to call."""

    @staticmethod
    def forward(row: Collective, call: Call, arguments: Any, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        return tuple(row.run(call, tensors, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        row, call, arguments, *tensors = inputs
        _Differentiable.remember(ctx, row, call, arguments, tensors, output)


# What follows runs inside the `with` of the call, so that a failure here reaches the other ranks.


def _call(
    row: Collective, name: str | None, process_set: ProcessSet, grouped: bool = False
) -> Call | library.TracedCall:
    kind = library.TracedCall if is_tracing() else Call
    return kind(row.op, name, process_set, grouped=grouped)


def _run(
    row: Collective, call: Call | library.TracedCall, tensors: Tensors, *arguments: Any
) -> Tensors:
    """Runs the collective, for tensors that want gradients so that they get them."""
    if isinstance(call, library.TracedCall):
        return call.run(row, tensors, *arguments)
    if any([getattr(t, "requires_grad", False) for t in tensors]) and torch.is_grad_enabled():
        transformed = torch._C._are_functorch_transforms_active()
        function = _Transformable if transformed else _Differentiable
        outputs: Tensors = function.apply(row, call, arguments, *tensors)  # type: ignore[no-untyped-call]
        return outputs
    return row.run(call, tensors, *arguments)


def _compressed(
    row: Collective,
    call: Call | library.TracedCall,
    compression: Compressing,
    tensors: Tensors,
    *arguments: Any,
) -> list[torch.Tensor]:
    """Runs the call on compressed tensors; those of calls without a name bind by place alone."""
    if compression is NoneCompressor:
        return list(_run(row, call, tensors, *arguments))
    for tensor in tensors:  # before a compressor trips over it
        require_tensor(tensor)
    name = call.op.name if call.unnamed else call.name
    bindings = [bound(compression, f"{name}.{i}") for i in range(len(tensors))]
    packed = [one.compress(tensor) for one, tensor in zip(bindings, tensors, strict=True)]
    outputs = _run(row, call, [tensor for tensor, _ in packed], *arguments)
    return [
        one.decompress(tensor, context)
        for one, tensor, (_, context) in zip(bindings, outputs, packed, strict=True)
    ]


def _reduction(call: Call | library.TracedCall, op: int | None, average: bool | None) -> int:
    """What ``op=`` and ``average=`` mean together."""
    choose = library.reduce_op if isinstance(call, library.TracedCall) else reduce_op
    return choose(op, average)


def _overwritten(
    row: Collective,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    grouped: bool,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    """An in-place form in a graph, where the compiler sees to what really is in place."""
    with torch.no_grad(), library.TracedCall(row.op, name, process_set, grouped=grouped) as call:
        results = call.run(row, tensors, *arguments)
        return tuple(t.copy_(result) for t, result in zip(tensors, results, strict=True))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressing = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor element by element over the members of a process set.

    The result is ``postscale_factor * reduce(prescale_factor * tensor_r)``; Average divides the
    sum by the size of the set besides. float16 and bfloat16 are summed in float32 and rounded
    once; integers average exactly, truncated toward zero. Blocks until every member has called it.
    Differentiable: the gradient is reduced in the same way.

    Args:
        tensor: of the same shape and data type on every member; any layout; 0-d and empty too. Not
            modified.
        average: deprecated: True for Average, False for Sum.
        name: matches the call with those of the other members.
        compression: what to do to the tensor for the way, see `Compression`.
        op: Average (if not given), Sum, Min, Max or Product.
        prescale_factor: multiplies each member's term.
        postscale_factor: multiplies the result.
        process_set: who takes part.

    Returns:
        A new tensor, equal on every member.

    Raises:
        ValueError: an argument is wrong here, or the name is in flight already.
        HorovodInternalError: members disagree, a peer is lost, or the engine isn't running.
    """
    with _call(ALLREDUCE, name, process_set) as call:
        scaled = (_reduction(call, op, average), prescale_factor, postscale_factor)
        return _compressed(ALLREDUCE, call, compression, [tensor], *scaled)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce`, but writes the result into the tensor and gives that; not differentiable."""
    scales = (prescale_factor, postscale_factor)
    if is_tracing():
        chosen = library.reduce_op(op, average)
        return _overwritten(ALLREDUCE, [tensor], name, process_set, False, chosen, *scales)[0]
    result: torch.Tensor = synchronize(
        reduce(ops.ALLREDUCE, tensor, IN_PLACE, name, op, average, *scales, process_set)
    )
    return result


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressing = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors as one call, none before all are there; otherwise as `allreduce`.

    Args:
        tensors: at least one; shapes and data types may differ among them, but not among members.
        average: as for `allreduce`, as all that follow.
        name: one for the group.
        compression: for each tensor.
        op: for all of them.
        prescale_factor: for all of them.
        postscale_factor: for all of them.
        process_set: who takes part.

    Returns:
        New tensors, in the order of `tensors`.
    """
    with _call(ALLREDUCE, name, process_set, grouped=True) as call:
        scaled = (_reduction(call, op, average), prescale_factor, postscale_factor)
        return _compressed(ALLREDUCE, call, compression, group(tensors), *scaled)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """As `grouped_allreduce`, but writes into the tensors and gives those; not differentiable."""
    scales = (prescale_factor, postscale_factor)
    if is_tracing():
        chosen = library.reduce_op(op, average)
        return _overwritten(ALLREDUCE, group(tensors), name, process_set, True, chosen, *scales)
    results: tuple[torch.Tensor, ...] = synchronize(
        reduce(
            ops.ALLREDUCE, tensors, IN_PLACE, name, op, average, *scales, process_set, grouped=True
        )
    )
    return results


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the members' tensors along dim 0, in the order of their ranks.

    Blocks until every member has called it. Differentiable: a member's gradient is its rows of the
    mean over members.

    Args:
        tensor: members may differ in dim 0, which may be 0, but in no other. Not modified.
        name: matches the call with those of the other members.
        process_set: who takes part.

    Returns:
        A new tensor, equal on every member.

    Raises:
        ValueError: an argument is wrong here (a 0-d tensor has no rows), or the name is in flight
            already.
        HorovodInternalError: members disagree, a peer is lost, or the engine isn't running.
    """
    with _call(ALLGATHER, name, process_set) as call:
        return _run(ALLGATHER, call, [tensor], None)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gathers several tensors as one call; otherwise as `allgather`."""
    with _call(ALLGATHER, name, process_set, grouped=True) as call:
        return tuple(_run(ALLGATHER, call, group(tensors), None))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Gives every member the root's tensor.

    Blocks until every member has called it. Differentiable: the root's gradient is the mean over
    members, the others' is zero.

    Args:
        tensor: of the same shape and data type on every member; 0-d and empty too. Not modified.
        root_rank: global rank of the member whose values count.
        name: matches the call with those of the other members.
        process_set: who takes part.

    Returns:
        A new tensor, also on the root.

    Raises:
        ValueError: an argument is wrong here, or the name is in flight already.
        HorovodInternalError: members disagree, a peer is lost, or the engine isn't running.
    """
    with _call(BROADCAST, name, process_set) as call:
        return _run(BROADCAST, call, [tensor], root_rank)[0]


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `broadcast`, but writes into the tensor and gives that; not differentiable."""
    if is_tracing():
        return _overwritten(BROADCAST, [tensor], name, process_set, False, root_rank)[0]
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows to each member, and receives some from each.

    Blocks until every member has called it. Differentiable: the gradient goes the way back.

    Args:
        tensor: members may differ in dim 0, but in no other. Not modified.
        splits: how many rows go to each member, in the order of their ranks: a 1-d int32 tensor or
            a list. Rows after their sum aren't sent. None: equal parts, and dim 0 must be a
            multiple of the number of members.
        name: matches the call with those of the other members.
        process_set: who takes part.

    Returns:
        The received rows in the order of their senders. With `splits`, the tuple of that tensor
        and of how many rows came from each member: like `splits` if that is a tensor, else int32.

    Raises:
        ValueError: an argument is wrong here, or the name is in flight already.
        HorovodInternalError: members disagree, a peer is lost, or the engine isn't running.
    """
    with _call(ALLTOALL, name, process_set) as call:
        if isinstance(call, library.TracedCall) and isinstance(splits, (list, tuple)):
            splits = torch.tensor(splits, dtype=torch.int32)
        output, received = _run(ALLTOALL, call, [tensor], splits, None)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressing = NoneCompressor,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over the members and gives each one its share of the rows.

    Of n rows the first ``n % members`` ranks get ``n // members + 1``, the others ``n //
    members``, in order. Blocks until every member has called it. Differentiable.

    Args:
        tensor: of the same shape and data type on every member, with at least one dimension. Not
            modified.
        name: matches the call with those of the other members.
        compression: what to do to the tensor for the way, see `Compression`.
        op: Average or Sum.
        process_set: who takes part.
        prescale_factor: multiplies each member's term.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor with this rank's rows.

    Raises:
        ValueError: an argument is wrong here, or the name is in flight already.
        HorovodInternalError: `op` is another one, members disagree, a peer is lost, or the engine
            isn't running.
    """
    with _call(REDUCESCATTER, name, process_set) as call:
        scaled = (_reduction(call, op, None), prescale_factor, postscale_factor)
        return _compressed(REDUCESCATTER, call, compression, [tensor], *scaled)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressing = NoneCompressor,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces and scatters several tensors as one call; otherwise as `reducescatter`."""
    with _call(REDUCESCATTER, name, process_set, grouped=True) as call:
        scaled = (_reduction(call, op, None), prescale_factor, postscale_factor)
        return _compressed(REDUCESCATTER, call, compression, group(tensors), *scaled)
