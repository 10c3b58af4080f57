"""Reduces sparse tensors by gathering what they hold; must not know how data travels.

A COO tensor travels as one grouped allgather of its indices and its values: entries at the same
place add up once the result is coalesced. A gather of rows can't see that members disagree about
the size of the tensor or the reduction, so each sends those facts in front of its indices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from horovod.common import basics, ops
from horovod.common.exceptions import HorovodInternalError, MismatchError
from horovod.common.ops import Call, ReduceOp, reduce_op, synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops import Average, submit
from horovod.torch.views import TO_ENGINE

_FACTS = 3  # rows: the sizes of the sparse dimensions; the reduction; the sender's rank


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int | None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """As `sparse_allreduce`, but gives a function that waits for the result, in place of a handle.

    That function may be called again, and then gives the same tensor or raises the same error.
    """
    full_name = None if name is None else f"sparse_allreduce.{name}"
    with Call(ops.ALLGATHER, full_name, process_set, grouped=True) as call:
        reduction = reduce_op(op, None)
        facts, indices, values = _parts(tensor, reduction)
        handle = submit(call, (torch.cat((~facts, indices)), values), TO_ENGINE)
    size, members = tensor.size(), ops.members(process_set)
    what = call.name

    @functools.cache
    def outcome() -> torch.Tensor | Exception:
        try:
            return reduced()
        except (ValueError, HorovodInternalError) as error:
            return error

    def reduced() -> torch.Tensor:
        rows, values = synchronize(handle)
        is_fact = rows[:, 0] < 0  # facts are sent as their complement, and no index is negative
        _agree(what, ~rows[is_fact].cpu())
        indices = rows[~is_fact].t()
        result = torch.sparse_coo_tensor(indices, values, size, check_invariants=False)
        return _reduced(result, reduction, members)

    def finish() -> torch.Tensor:
        result = outcome()
        if isinstance(result, Exception):
            raise result
        return result

    return finish


def sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Sums or averages a sparse COO tensor over the members of a process set.

    Blocks until every member has called it. Not differentiable.

    Args:
        tensor: COO, of the same size, number of sparse dimensions and data type on every member;
            each may hold other entries, in any number (0 too), coalesced or not. Not modified.
        name: matches the call with those of the other members.
        op: Average (if not given) divides the sum by the size of the set, integers truncated toward
            zero; every other constant means the sum.
        process_set: who takes part.

    Returns:
        A new sparse tensor of the data type and device of ``tensor``, equal on every member. It may
        hold several entries of one place, which count as their sum, until it is coalesced.

    Raises:
        ValueError: the tensor is not sparse COO, bool can't be averaged, or the name is in flight
            already.
        HorovodInternalError: members disagree, a peer is lost, or the engine isn't running.
    """
    return sparse_allreduce_async(tensor, name, op, process_set)()


def _parts(tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The facts, the indices with one entry a row, and the values."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a sparse torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"a {tensor.layout} tensor is not supported: pass tensor.to_sparse_coo(), or use "
            f"allreduce for a dense one"
        )
    dims = tensor.sparse_dim()
    if dims == 0:
        raise ValueError("a tensor without sparse dimensions is not supported: use allreduce")
    if op is Average and tensor.dtype is torch.bool:
        raise ValueError("bool tensors can't be averaged: pass op=Sum")
    tensor = tensor.detach().coalesce()  # what this rank holds twice need not travel twice
    indices = tensor.indices().t()
    facts = indices.new_tensor([tensor.shape[:dims], [op] * dims, [basics.rank()] * dims])
    return facts, indices, tensor.values()


def _agree(what: str, facts: torch.Tensor) -> None:
    """Raises, on every member alike, if the facts of any two differ in more than the rank."""
    (sizes, ops_, ranks), *others = facts.view(-1, _FACTS, facts.shape[-1]).tolist()
    for other_sizes, other_ops, other_ranks in others:
        for noun, mine, other in (
            ("sparse sizes", sizes, other_sizes),
            ("op", ReduceOp(ops_[0]).name, ReduceOp(other_ops[0]).name),
        ):
            if mine != other:
                raise MismatchError(
                    f"{basics.label()} {what}: rank {ranks[0]} sent {noun} {mine}, rank "
                    f"{other_ranks[0]} {other}",
                    op=what,
                )


def _reduced(gathered: torch.Tensor, op: ReduceOp, members: int) -> torch.Tensor:
    """Rounded as a dense tensor would be: 16-bit floats once, integers after the whole sum."""
    dtype = gathered.dtype
    if dtype.is_floating_point and dtype.itemsize == 2:
        gathered = gathered.float().coalesce()
    if op is Average and (dtype.is_floating_point or dtype.is_complex):
        gathered = torch.div(gathered, members)
    elif op is Average:
        gathered = torch.div(gathered.coalesce(), members, rounding_mode="trunc")
    return gathered.to(dtype)
