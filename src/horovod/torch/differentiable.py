"""The synchronous collectives that give new tensors, and their gradients.

They must not know how data travels. All members of ``process_set`` must make the call, with the
same name; calls without one match in the order they are made. The order of results follows the
ranks of the set, the root is a global rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common import basics, ops
from horovod.common.compression import NoneCompressor, bound
from horovod.common.ops import Call, ReduceOp, reduce_op, synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops import (
    Average,
    Compressing,
    Sum,
    Tensors,
    alltoall_async,
    broadcast_async,
    submit,
)
from horovod.torch.views import to_engine, to_new


class _Differentiable(torch.autograd.Function):
    """Any collective: ``run`` makes outputs, ``gradient`` the tensors' gradients of theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Tensors], Tensors],
        gradient: Callable[[Tensors], Tensors],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(grads))


def _differentiable(
    run: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors], tensors: Tensors
) -> Tensors:
    if not (torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)):
        return run(tensors)
    outputs: Tensors = _Differentiable.apply(run, gradient, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def _outputs(handle: int, grouped: bool) -> Tensors:
    result = synchronize(handle)
    return tuple(result) if grouped else (result,)


# What follows runs inside the `with` of the call, so that a failure here reaches the other ranks.
# A gradient must not refer to the call, which would keep an engine for as long as the graph.


def _compressed(
    call: Call, compression: Compressing, tensors: Tensors, run: Callable[[Tensors], Tensors]
) -> list[torch.Tensor]:
    """Runs the call on compressed tensors; those of calls without a name bind by place alone."""
    name = call.op.name if call.unnamed else call.name
    bindings = [bound(compression, f"{name}.{i}") for i in range(len(tensors))]
    packed = [one.compress(tensor) for one, tensor in zip(bindings, tensors, strict=True)]
    outputs = run([tensor for tensor, _ in packed])
    return [
        one.decompress(tensor, context)
        for one, tensor, (_, context) in zip(bindings, outputs, packed, strict=True)
    ]


def _allreduce(
    call: Call,
    tensors: Tensors,
    compression: Compressing,
    op: ReduceOp,
    scales: tuple[float, float],
) -> list[torch.Tensor]:
    grouped, process_set = call.grouped, call.process_set
    options: dict[str, Any] = {"reduce_op": op, "prescale": scales[0], "postscale": scales[1]}

    def run(tensors: Tensors) -> Tensors:
        return _outputs(submit(call, tensors, to_new, **options), grouped)

    def gradient(grads: Tensors) -> Tensors:
        with Call(ops.ALLREDUCE, None, process_set, grouped=grouped) as back:
            return _allreduce(back, grads, NoneCompressor, op, scales)

    return _compressed(call, compression, tensors, lambda t: _differentiable(run, gradient, t))


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
    scales = (prescale_factor, postscale_factor)
    with Call(ops.ALLREDUCE, name, process_set) as call:
        return _allreduce(call, [tensor], compression, reduce_op(op, average), scales)[0]


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
    scales = (prescale_factor, postscale_factor)
    with Call(ops.ALLREDUCE, name, process_set, grouped=True) as call:
        return _allreduce(call, list(tensors), compression, reduce_op(op, average), scales)


def _mean(grads: Tensors, grouped: bool, process_set: ProcessSet) -> list[torch.Tensor]:
    with Call(ops.ALLREDUCE, None, process_set, grouped=grouped) as call:
        return _allreduce(call, grads, NoneCompressor, Average, (1.0, 1.0))


def _allgather(call: Call, tensors: Tensors) -> Tensors:
    grouped, process_set = call.grouped, call.process_set

    def run(tensors: Tensors) -> Tensors:
        return _outputs(submit(call, tensors, to_engine), grouped)

    def gradient(grads: Tensors) -> Tensors:
        means = _mean(grads, grouped, process_set)
        mine = torch.tensor([[tensor.shape[0] for tensor in tensors]])
        rows = allgather(mine, process_set=process_set)
        starts = rows[: ops.index(process_set)].sum(0).tolist()
        return [
            mean.narrow(0, start, count)
            for mean, start, count in zip(means, starts, mine[0].tolist(), strict=True)
        ]

    return _differentiable(run, gradient, tensors)


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
    with Call(ops.ALLGATHER, name, process_set) as call:
        return _allgather(call, [tensor])[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gathers several tensors as one call; otherwise as `allgather`."""
    with Call(ops.ALLGATHER, name, process_set, grouped=True) as call:
        return tuple(_allgather(call, list(tensors)))


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

    def run(tensors: Tensors) -> Tensors:
        return (synchronize(broadcast_async(tensors[0], root_rank, name, process_set)),)

    def gradient(grads: Tensors) -> Tensors:
        means = _mean(grads, False, process_set)
        return means if basics.rank() == root_rank else [torch.zeros_like(mean) for mean in means]

    return _differentiable(run, gradient, [tensor])[0]


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
    received: list[torch.Tensor] = []

    def run(tensors: Tensors) -> Tensors:
        output, rows = synchronize(alltoall_async(tensors[0], splits, name, process_set))
        received.append(rows)
        return (output,)

    def gradient(grads: Tensors) -> Tensors:
        back, _ = alltoall(grads[0], received[0], process_set=process_set)
        unsent = back.new_zeros((tensor.shape[0] - back.shape[0], *back.shape[1:]))
        return (torch.cat([back, unsent]) if len(unsent) else back,)

    output = _differentiable(run, gradient, [tensor])[0]
    return output if splits is None else (output, received[0])


def _reducescatter(
    call: Call,
    tensors: Tensors,
    compression: Compressing,
    op: ReduceOp,
    scales: tuple[float, float],
) -> list[torch.Tensor]:
    grouped, process_set = call.grouped, call.process_set
    options: dict[str, Any] = {"reduce_op": op, "prescale": scales[0], "postscale": scales[1]}

    def run(tensors: Tensors) -> Tensors:
        return _outputs(submit(call, tensors, to_engine, **options), grouped)

    def gradient(grads: Tensors) -> Tensors:
        size = ops.members(process_set) if op is Sum else 1
        scale = size * scales[0] * scales[1]
        with Call(ops.ALLGATHER, None, process_set, grouped=grouped) as back:
            return [grad * scale for grad in _allgather(back, grads)]

    return _compressed(call, compression, tensors, lambda t: _differentiable(run, gradient, t))


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
    scales = (prescale_factor, postscale_factor)
    with Call(ops.REDUCESCATTER, name, process_set) as call:
        return _reducescatter(call, [tensor], compression, reduce_op(op, None), scales)[0]


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
    scales = (prescale_factor, postscale_factor)
    with Call(ops.REDUCESCATTER, name, process_set, grouped=True) as call:
        return _reducescatter(call, list(tensors), compression, reduce_op(op, None), scales)
