"""The asynchronous collectives; must not know how data travels, nor of gradients.

All members of ``process_set`` must make the call, with the same name; calls without one match in
the order they are made. The order of results follows the ranks of the set, the root is a global
rank. While a handle is open its tensors belong to the library: don't write or resize them.

A CUDA tensor travels through host memory: submitting it waits until the work that was queued before
on the current stream of its device is done and the tensor copied. After `synchronize` the result is
safe for what is queued on the stream that is current then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from horovod.common import ops, sites
from horovod.common.compression import Compressor, NoneCompressor
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops import Call, Op, ReduceOp, reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.views import IN_PLACE, TO_ENGINE, TO_NEW, Staged, Way

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

Compressing = type[Compressor[torch.Tensor]] | Compressor[torch.Tensor] | type[NoneCompressor]
Tensors = Sequence[torch.Tensor]

# Frames of torch, and of the code it generates, between a hook of ours and the user's line.
sites.pass_over(os.path.dirname(torch.__file__) + os.sep, "<eval_with_key>", "torchinductor_")


TRACEABLE = hasattr(torch.library, "register_autograd")  # torch 2.4


def is_tracing() -> bool:
    """Whether this runs to become part of a compiled graph."""
    return TRACEABLE and torch.compiler.is_compiling()


def group(tensors: Tensors) -> list[torch.Tensor]:
    """The tensors of a grouped call; a single tensor would silently be taken for its rows."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError("a list of tensors is needed, not one tensor")
    return list(tensors)


def submit(call: Call, tensors: Tensors, way: Way, **options: Any) -> int:
    """Submits the call's tensor, or its group; `options` are those of `Call.start`.

    Whatever can fail on one rank alone belongs inside the ``with`` of the call, as this does, also
    making the options: then the other ranks are told. Waits until tensors of an accelerator have
    been copied to the host, which is until the device has done what the program queued before.
    """
    tensors = group(tensors)
    handle = call.start(way.form, tensors if call.grouped else tensors[0], **options)
    if handle is not None:
        return handle
    staged = [way.stage(tensor) for tensor in tensors]
    if not staged:
        raise ValueError("the list of tensors is empty")
    if len(staged) > 1 and len({tensor.device for tensor in tensors}) > 1:
        devices = sorted({str(tensor.device) for tensor in tensors})
        raise HorovodInternalError(
            f"{call.name}: the tensors of a group must be on one device, not on "
            f"{' and '.join(devices)}",
            op=call.name,
        )
    for one in staged:  # all copies have been started
        one.ready()
    finish = partial(_results if call.grouped else _one_result, staged)
    return call.submit([one.view for one in staged], finish, keep=staged, **options)


def _one_result(staged: list[Staged], result: Any) -> torch.Tensor:
    return staged[0].finish(result, 0)


def _results(staged: list[Staged], result: Any) -> tuple[torch.Tensor, ...]:
    return tuple([one.finish(result, i) for i, one in enumerate(staged)])


def reduce(
    kind: Op,
    tensors: Any,
    way: Way,
    name: str | None,
    op: int | None,
    average: bool | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool = False,
) -> int:
    """Submits a call that reduces a tensor, or a list of them. For what users call directly."""
    chosen = ReduceOp.Average if op is None else op
    if average is None and type(chosen) is ReduceOp:
        handle = ops.start(
            way.form, kind, tensors, name, process_set, grouped, chosen, prescale, postscale
        )
        if handle is not None:
            return handle
    with Call(kind, name, process_set, grouped=grouped) as call:
        chosen = reduce_op(op, average)
        return submit(
            call,
            tensors if grouped else [tensors],
            way,
            reduce_op=chosen,
            prescale=prescale,
            postscale=postscale,
        )


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
    return reduce(
        ops.ALLREDUCE,
        tensor,
        TO_NEW,
        name,
        op,
        average,
        prescale_factor,
        postscale_factor,
        process_set,
    )


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
    return reduce(
        ops.ALLREDUCE,
        tensor,
        IN_PLACE,
        name,
        op,
        average,
        prescale_factor,
        postscale_factor,
        process_set,
    )


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
    return reduce(
        ops.ALLREDUCE,
        tensors,
        TO_NEW,
        name,
        op,
        average,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


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
    return reduce(
        ops.ALLREDUCE,
        tensors,
        IN_PLACE,
        name,
        op,
        average,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `allgather`, but gives a handle at once."""
    with Call(ops.ALLGATHER, name, process_set) as call:
        return submit(call, (tensor,), TO_ENGINE)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `grouped_allgather`, but gives a handle at once; `synchronize` then gives a tuple."""
    with Call(ops.ALLGATHER, name, process_set, grouped=True) as call:
        return submit(call, tensors, TO_ENGINE)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `broadcast`, but gives a handle at once."""
    with Call(ops.BROADCAST, name, process_set) as call:
        return submit(call, (tensor,), TO_NEW, root=root_rank)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `broadcast_`, but gives a handle at once; `synchronize` then gives the tensor itself."""
    with Call(ops.BROADCAST, name, process_set) as call:
        return submit(call, (tensor,), IN_PLACE, root=root_rank)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `alltoall`, but gives a handle at once; `synchronize` always gives the tuple."""
    with Call(ops.ALLTOALL, name, process_set) as call:
        return submit_alltoall(call, tensor, splits)


def submit_alltoall(
    call: Call, tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None
) -> int:
    """Submits an alltoall; its result is the tuple of the output and the received splits."""
    staged = TO_ENGINE.stage(tensor)
    sent, device = _splits(splits)

    def finish(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.tensor(result.splits, dtype=torch.int32, device=device)
        return staged.finish(result, 0), rows

    staged.ready()
    return call.submit([staged.view], finish, keep=staged, splits=sent)


def _splits(splits: torch.Tensor | Sequence[int] | None) -> tuple[list[int] | None, torch.device]:
    """The splits as a list, and the device for the received ones."""
    if splits is None:
        return None, torch.device("cpu")
    if not isinstance(splits, torch.Tensor):
        try:
            given = list(splits)
            splits = torch.tensor([int(rows) for rows in given], dtype=torch.int32)
            if splits.tolist() != given:  # int() takes texts and cuts fractions off
                raise ValueError("not whole numbers")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"splits must be whole numbers of rows, not {splits!r}") from error
    if splits.dtype is not torch.int32:
        raise ValueError(f"splits must be int32, not {splits.dtype}")
    if splits.dim() != 1:
        raise ValueError(f"splits must have 1 dimension, not {splits.dim()}")
    return splits.tolist(), splits.device


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `reducescatter`, but gives a handle at once."""
    return reduce(
        ops.REDUCESCATTER,
        tensor,
        TO_ENGINE,
        name,
        op,
        None,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `grouped_reducescatter`, but gives a handle at once; `synchronize` then gives a tuple."""
    return reduce(
        ops.REDUCESCATTER,
        tensors,
        TO_ENGINE,
        name,
        op,
        None,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


def join(device: int = -1) -> int:
    """Says that this rank is out of data, and waits until every rank has said so.

    Until then the others' allreduces go on without this rank's terms: for Sum as if it sent zeros,
    and Average still divides by the full size; Min, Max and Product are those of the others' terms.
    Any other collective of theirs fails, unless ``HOROVOD_JOIN_ALL_OPS=1`` was set for `init`: then
    they all leave this rank out, which sends no rows, and only a broadcast from it fails.

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
