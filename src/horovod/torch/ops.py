"""Collectives on torch tensors; must not know how data travels.

Every synchronous form that returns a new tensor is differentiable. All members of ``process_set``
must make the call, with the same name (calls without one match in the order they are made); the
root and the result order follow the ranks of the set. While a handle is open its tensors belong to
the library: don't write or resize them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common import basics, ops
from horovod.common.compression import Compressor, NoneCompressor
from horovod.common.ops import Call, ReduceOp, reduce_op, synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.views import Staged, in_place, to_engine, to_new

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

Compressing = type[Compressor[torch.Tensor]] | Compressor[torch.Tensor] | type[NoneCompressor]
Tensors = Sequence[torch.Tensor]


def _submit(
    op: ops.Op,
    tensors: Sequence[torch.Tensor],
    stage: Callable[[torch.Tensor], Staged],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool = False,
    **options: Any,
) -> int:
    """Submits one tensor, or a group under one name; `options` are those of `Call.submit`."""
    with Call(op, name, process_set, grouped=grouped) as call:
        staged = [stage(tensor) for tensor in tensors]
        if not staged:
            raise ValueError("the list of tensors is empty")

        def finish(result: Any) -> Any:
            outputs = tuple(
                one.finish(output) for one, output in zip(staged, result.outputs, strict=True)
            )
            return outputs if grouped else outputs[0]

        return call.submit([one.view for one in staged], finish, keep=staged, **options)


# ---------------------------------------------------------------------------------------------
# Gradients


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


# ---------------------------------------------------------------------------------------------
# Allreduce


def _allreduce(
    tensors: Tensors,
    grouped: bool,
    name: str | None,
    compression: Compressing,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    options: dict[str, Any] = {"reduce_op": op, "prescale": scales[0], "postscale": scales[1]}

    def run(tensors: Tensors) -> Tensors:
        handle = _submit(ops.ALLREDUCE, tensors, to_new, name, process_set, grouped, **options)
        return _outputs(handle, grouped)

    def gradient(grads: Tensors) -> Tensors:
        return _allreduce(grads, grouped, None, NoneCompressor, op, scales, process_set)

    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = _differentiable(run, gradient, [tensor for tensor, _ in packed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]


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
    chosen = reduce_op(op, average)
    return _allreduce([tensor], False, name, compression, chosen, scales, process_set)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `allreduce`, but gives a handle at once; `synchronize` then gives a new tensor."""
    return _submit(
        ops.ALLREDUCE,
        (tensor,),
        to_new,
        name,
        process_set,
        reduce_op=reduce_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


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
    handle = allreduce_async_(
        tensor, None, name, reduce_op(op, average), prescale_factor, postscale_factor, process_set
    )
    result: torch.Tensor = synchronize(handle)
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `allreduce_`, but gives a handle at once; `synchronize` then gives the tensor itself."""
    return _submit(
        ops.ALLREDUCE,
        (tensor,),
        in_place,
        name,
        process_set,
        reduce_op=reduce_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


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
    chosen = reduce_op(op, average)
    return _allreduce(tensors, True, name, compression, chosen, scales, process_set)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `grouped_allreduce`, but gives a handle at once; `synchronize` then gives a tuple."""
    return _submit(
        ops.ALLREDUCE,
        tensors,
        to_new,
        name,
        process_set,
        grouped=True,
        reduce_op=reduce_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


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
    handle = grouped_allreduce_async_(
        tensors, None, name, reduce_op(op, average), prescale_factor, postscale_factor, process_set
    )
    results: tuple[torch.Tensor, ...] = synchronize(handle)
    return results


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `grouped_allreduce_`, but gives a handle at once; `synchronize` then gives a tuple."""
    return _submit(
        ops.ALLREDUCE,
        tensors,
        in_place,
        name,
        process_set,
        grouped=True,
        reduce_op=reduce_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


# ---------------------------------------------------------------------------------------------
# Allgather


def _allgather(
    tensors: Tensors, grouped: bool, name: str | None, process_set: ProcessSet
) -> Tensors:
    def run(tensors: Tensors) -> Tensors:
        handle = _submit(ops.ALLGATHER, tensors, to_engine, name, process_set, grouped)
        return _outputs(handle, grouped)

    def gradient(grads: Tensors) -> Tensors:
        means = _allreduce(grads, grouped, None, NoneCompressor, Average, (1.0, 1.0), process_set)
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
    return _allgather([tensor], False, name, process_set)[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `allgather`, but gives a handle at once."""
    return _submit(ops.ALLGATHER, (tensor,), to_engine, name, process_set)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gathers several tensors as one call; otherwise as `allgather`."""
    return tuple(_allgather(tensors, True, name, process_set))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `grouped_allgather`, but gives a handle at once; `synchronize` then gives a tuple."""
    return _submit(ops.ALLGATHER, tensors, to_engine, name, process_set, grouped=True)


# ---------------------------------------------------------------------------------------------
# Broadcast


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
        handle = _submit(ops.BROADCAST, tensors, to_new, name, process_set, root=root_rank)
        return _outputs(handle, False)

    def gradient(grads: Tensors) -> Tensors:
        means = _allreduce(grads, False, None, NoneCompressor, Average, (1.0, 1.0), process_set)
        return means if basics.rank() == root_rank else [torch.zeros_like(mean) for mean in means]

    return _differentiable(run, gradient, [tensor])[0]


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `broadcast`, but gives a handle at once."""
    return _submit(ops.BROADCAST, (tensor,), to_new, name, process_set, root=root_rank)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `broadcast`, but writes into the tensor and gives that; not differentiable."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `broadcast_`, but gives a handle at once; `synchronize` then gives the tensor itself."""
    return _submit(ops.BROADCAST, (tensor,), in_place, name, process_set, root=root_rank)


# ---------------------------------------------------------------------------------------------
# Alltoall


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


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `alltoall`, but gives a handle at once; `synchronize` always gives the tuple."""
    with Call(ops.ALLTOALL, name, process_set) as call:
        staged = to_engine(tensor)
        sent, device = _splits(splits)

        def finish(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
            rows = torch.tensor(result.splits, dtype=torch.int32, device=device)
            return staged.finish(result.outputs[0]), rows

        return call.submit([staged.view], finish, keep=staged, splits=sent)


def _splits(splits: torch.Tensor | Sequence[int] | None) -> tuple[list[int] | None, torch.device]:
    """The splits as a list, and the device for the received ones."""
    if splits is None:
        return None, torch.device("cpu")
    if not isinstance(splits, torch.Tensor):
        try:
            splits = torch.tensor([int(rows) for rows in splits], dtype=torch.int32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"splits must be whole numbers of rows, not {splits!r}") from error
    if splits.dtype is not torch.int32:
        raise ValueError(f"splits must be int32, not {splits.dtype}")
    if splits.dim() != 1:
        raise ValueError(f"splits must have 1 dimension, not {splits.dim()}")
    return splits.tolist(), splits.device


# ---------------------------------------------------------------------------------------------
# Reducescatter


def _reducescatter(
    tensors: Tensors,
    grouped: bool,
    name: str | None,
    compression: Compressing,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    options: dict[str, Any] = {"reduce_op": op, "prescale": scales[0], "postscale": scales[1]}

    def run(tensors: Tensors) -> Tensors:
        handle = _submit(
            ops.REDUCESCATTER, tensors, to_engine, name, process_set, grouped, **options
        )
        return _outputs(handle, grouped)

    def gradient(grads: Tensors) -> Tensors:
        size = ops.members(process_set) if op is Sum else 1
        scale = size * scales[0] * scales[1]
        return [grad * scale for grad in _allgather(grads, grouped, None, process_set)]

    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = _differentiable(run, gradient, [tensor for tensor, _ in packed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]


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
    chosen = reduce_op(op, None)
    return _reducescatter([tensor], False, name, compression, chosen, scales, process_set)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `reducescatter`, but gives a handle at once."""
    return _submit(
        ops.REDUCESCATTER,
        (tensor,),
        to_engine,
        name,
        process_set,
        reduce_op=reduce_op(op, None),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


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
    chosen = reduce_op(op, None)
    return _reducescatter(tensors, True, name, compression, chosen, scales, process_set)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `grouped_reducescatter`, but gives a handle at once; `synchronize` then gives a tuple."""
    return _submit(
        ops.REDUCESCATTER,
        tensors,
        to_engine,
        name,
        process_set,
        grouped=True,
        reduce_op=reduce_op(op, None),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


# ---------------------------------------------------------------------------------------------
# Without tensors


def join(device: int = -1) -> int:
    """Says that this rank is out of data, and waits until every rank has said so.

    Until then the others' allreduces go on without this rank's terms, as if it sent zeros: Average
    still divides by the full size. Any other collective of theirs fails.

    Args:
        device: kept for compatibility; nothing is made on it.

    Returns:
        The rank that joined last, the same on every rank.

    Raises:
        HorovodInternalError: a peer is lost or the engine isn't running.
    """
    return ops.join(global_process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every member of the set has called it.

    Asynchronous operations may still be in flight afterwards.

    Args:
        process_set: who waits for whom.

    Raises:
        HorovodInternalError: a peer is lost or the engine isn't running.
    """
    ops.barrier(process_set)
