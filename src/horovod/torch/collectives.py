"""The blocking collectives as rows: how each runs, its shapes and its gradient.

They must not know how data travels, nor whether they run eagerly or as operators of a compiled
graph. A gradient is made of collectives too, so that gradients have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from horovod.common import basics, ops
from horovod.common.ops import Call, Op, ReduceOp, reduce_op, synchronize
from horovod.common.process_sets import ProcessSet
from horovod.torch.ops import Tensors, submit, submit_alltoall
from horovod.torch.views import TO_ENGINE, TO_NEW

Unknown = Callable[[], Any]
"""Gives a size that is not known before the collective has run."""


class Past(Protocol):
    """What a gradient may know of the call it belongs to, and how it makes calls of its own."""

    process_set: ProcessSet
    rows: list[int]
    """The rows of each input."""
    received: Sequence[torch.Tensor]
    """The outputs after the first, of a collective that `keeps` them."""

    def call(self, row: Collective, tensors: Tensors, *arguments: Any) -> Tensors:
        """Makes an unnamed, differentiable call with the same members and grouping."""


@dataclass(frozen=True, eq=False)
class Collective:
    """One row: a blocking collective on a list of tensors, of which only groups have several."""

    name: str
    op: Op
    """What it calls, which for gradients has another name."""
    schema: str
    """Its arguments after the tensors, in the language of torch's operators."""
    run: Callable[..., Tensors]
    """From the open call, the tensors and the arguments; inside the ``with`` of the call."""
    empty: Callable[..., list[torch.Tensor]]
    """Tensors like the outputs, from an `Unknown`, the tensors and the arguments."""
    gradient: Callable[..., Tensors]
    """From the `Past`, the outputs' gradients and the arguments."""
    placed: bool = False
    """Whether shapes depend on the rank: a compiled graph adds the `place` to the arguments."""
    keeps: bool = False
    """Whether the gradient needs the outputs after the first."""


def _outputs(call: Call, handle: int) -> Tensors:
    result = synchronize(handle)
    return tuple(result) if call.grouped else (result,)


def _same(_: Any, tensors: Tensors, *__: Any) -> list[torch.Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _with_rows(tensors: Tensors, rows: Sequence[int]) -> list[torch.Tensor]:
    return [t.new_empty((n, *t.shape[1:])) for t, n in zip(tensors, rows, strict=True)]


def _reduced(
    call: Call, stage: Any, tensors: Tensors, op: int, prescale: float, postscale: float
) -> Tensors:
    chosen = reduce_op(op, None)
    handle = submit(call, tensors, stage, reduce_op=chosen, prescale=prescale, postscale=postscale)
    return _outputs(call, handle)


def _mean(call: Call, tensors: Tensors) -> Tensors:
    return _reduced(call, TO_NEW, tensors, ReduceOp.Average, 1.0, 1.0)


def _share(past: Past, grads: Tensors) -> list[torch.Tensor]:
    size = ops.members(past.process_set)
    return [grad / size for grad in grads]


# allreduce: the gradient is reduced in the same way.

_SCALED = "int op, float prescale, float postscale"

ALLREDUCE: Collective = Collective(
    "allreduce",
    ops.ALLREDUCE,
    _SCALED,
    run=lambda call, tensors, *scaled: _reduced(call, TO_NEW, tensors, *scaled),
    empty=_same,
    gradient=lambda past, grads, *scaled: past.call(ALLREDUCE, grads, *scaled),
)

# allgather: a member's gradient is its own rows of the mean. `rows` are those of the outputs where
# they are known beforehand, for compiled graphs.

ALLGATHER: Collective = Collective(
    "allgather",
    ops.ALLGATHER,
    "SymInt[]? rows",
    run=lambda call, tensors, rows: _outputs(call, submit(call, tensors, TO_ENGINE)),
    empty=lambda unknown, tensors, rows: _with_rows(tensors, rows or [unknown() for _ in tensors]),
    gradient=lambda past, grads, rows: past.call(OWN_ROWS, grads, past.rows),
)


def _own_rows(call: Call, tensors: Tensors, rows: Sequence[int]) -> list[torch.Tensor]:
    means = _mean(call, tensors)
    # Named after the call: in a backward pass a number would shift those of the user's calls.
    with Call(ops.ALLGATHER, f"{call.name}.rows", call.process_set) as gather:
        gather.unnamed = call.unnamed
        handle = submit(gather, [torch.tensor([list(rows)])], TO_ENGINE)
    starts = synchronize(handle)[: ops.index(call.process_set)].sum(0).tolist()
    cut = zip(means, starts, rows, strict=True)
    return [mean.narrow(0, start, count).clone() for mean, start, count in cut]


OWN_ROWS: Collective = Collective(
    "own_rows",
    ops.ALLREDUCE,
    "SymInt[] rows",
    run=_own_rows,
    empty=lambda _, tensors, rows: _with_rows(tensors, rows),
    gradient=lambda past, grads, rows: _share(past, past.call(ALLGATHER, grads, past.rows)),
)

# broadcast: the root's gradient is the mean, the others' is zero.

BROADCAST: Collective = Collective(
    "broadcast",
    ops.BROADCAST,
    "int root",
    run=lambda call, tensors, root: _outputs(call, submit(call, tensors, TO_NEW, root=root)),
    empty=_same,
    gradient=lambda past, grads, root: past.call(ROOT_MEAN, grads, root),
)


def _root_mean(call: Call, tensors: Tensors, root: int) -> Tensors:
    means = _mean(call, tensors)
    return means if basics.rank() == root else [mean.zero_() for mean in means]


ROOT_MEAN: Collective = Collective(
    "root_mean",
    ops.ALLREDUCE,
    "int root",
    run=_root_mean,
    empty=_same,
    gradient=lambda past, grads, root: _share(past, past.call(BROADCAST, grads, root)),
)

# alltoall: the gradient goes the way back, with zeros for rows that weren't sent: `rows`, if not
# None, are those of the output, which is filled up. Of such an output the filling isn't sent back.


def _alltoall(call: Call, tensors: Tensors, splits: Any, rows: int | None) -> Tensors:
    output, received = synchronize(submit_alltoall(call, tensors[0], splits))
    missing = 0 if rows is None else rows - output.shape[0]
    if missing:
        output = torch.cat([output, output.new_zeros((missing, *output.shape[1:]))])
    return output, received


def _alltoall_empty(
    unknown: Unknown, tensors: Tensors, splits: torch.Tensor | None, rows: int | None
) -> list[torch.Tensor]:
    output = _with_rows(tensors, [unknown() if rows is None else rows])
    members = unknown() if splits is None else splits.shape[0]
    return [*output, torch.empty(members, dtype=torch.int32)]


ALLTOALL: Collective = Collective(
    "alltoall",
    ops.ALLTOALL,
    "Tensor? splits, SymInt? rows",
    run=_alltoall,
    empty=_alltoall_empty,
    gradient=lambda past, grads, splits, rows: past.call(
        ALLTOALL, grads[:1], past.received[0], past.rows[0]
    )[:1],
    keeps=True,
)

# reducescatter: the gradient is gathered.


def place(process_set: ProcessSet) -> tuple[int, int]:
    """The size of the set and this rank's place in it."""
    return ops.members(process_set), ops.index(process_set)


def _reducescatter(
    call: Call,
    tensors: Tensors,
    op: int,
    prescale: float,
    postscale: float,
    *compiled_for: int,
) -> Tensors:
    if compiled_for and compiled_for != place(call.process_set):
        raise ValueError(
            f"this graph was compiled for (members, index) = {compiled_for}, not for "
            f"{place(call.process_set)}: call torch.compiler.reset() once the world has changed"
        )
    return _reduced(call, TO_ENGINE, tensors, op, prescale, postscale)


def _reducescatter_empty(
    _: Unknown,
    tensors: Tensors,
    op: int,
    prescale: float,
    postscale: float,
    members: int,
    index: int,
) -> list[torch.Tensor]:
    rows = [t.shape[0] // members + (index < t.shape[0] % members) for t in tensors]
    return _with_rows(tensors, rows)


def _reducescatter_gradient(
    past: Past, grads: Tensors, op: int, prescale: float, postscale: float, *_: int
) -> list[torch.Tensor]:
    terms = ops.members(past.process_set) if op == ReduceOp.Sum else 1
    scale = terms * prescale * postscale
    return [grad * scale for grad in past.call(ALLGATHER, grads, past.rows)]


REDUCESCATTER: Collective = Collective(
    "reducescatter",
    ops.REDUCESCATTER,
    f"{_SCALED}, int members, int index",
    run=_reducescatter,
    empty=_reducescatter_empty,
    gradient=_reducescatter_gradient,
    placed=True,
)

COLLECTIVES = (ALLREDUCE, ALLGATHER, OWN_ROWS, BROADCAST, ROOT_MEAN, ALLTOALL, REDUCESCATTER)
