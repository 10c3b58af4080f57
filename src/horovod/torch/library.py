"""Makes operators of the collectives, for compiled graphs; must not know how they run.

Tracing meets a `TracedCall` in place of a `Call` and puts an operator of the namespace ``horovod``
into the graph. All that depends on the moment is found out when the operator runs: the number of a
call without a name, the process set of an id, and whether the arguments are right.

The operators have effects, in torch's sense: the compiler keeps their order, and neither merges two
that look alike nor drops one whose result isn't used. So a compiled rank makes the calls that an
eager one makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from horovod.common import process_sets
from horovod.common.ops import Call, Op, ReduceOp
from horovod.common.process_sets import ProcessSet
from horovod.torch.collectives import COLLECTIVES, Collective, place
from horovod.torch.ops import TRACEABLE, Tensors

_HEAD = "Tensor[] tensors, str? name, bool grouped, int process_set"
_library: Any = torch.library.Library("horovod", "DEF")  # type: ignore[no-untyped-call]


def reduce_op(op: int | None, average: bool | None) -> int:
    """As that of `ops`, which can't be traced as it warns; the operator checks the value."""
    if op is not None and average is not None:
        raise ValueError("give op or average, not both")
    if op is None:
        op = ReduceOp.Sum if average is False else ReduceOp.Average
    return int(op)


def rows_of(tensors: Tensors) -> list[int]:
    """The rows of each; a tensor without dimensions counts as one."""
    return [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]


class TracedCall:
    """Stands in for a `Call` in what is traced; a context manager like it.

    Args:
        op: the row of the table.
        name: the user's name, None for a number that is given at run time.
        process_set: who takes part.
        grouped: several tensors go under the one name.
    """

    def __init__(
        self, op: Op, name: str | None, process_set: ProcessSet, *, grouped: bool = False
    ) -> None:
        """Notes what the operator needs."""
        self.op = op
        self.unnamed = name is None
        self.name = f"{op.name}.{name}"
        self._head = (name, grouped, _id_of(process_set))
        self._process_set = process_set

    def __enter__(self) -> TracedCall:
        """Does nothing: what fails while tracing fails before any rank waits."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Does nothing."""

    def run(self, row: Collective, tensors: Tensors, *arguments: Any) -> Tensors:
        """Puts the row's operator into the graph."""
        if row.placed:
            arguments = (*arguments, *place(self._process_set))
        outputs: Tensors = _operator(row)(list(tensors), *self._head, *arguments)
        return outputs


def _id_of(process_set: ProcessSet) -> int:
    # Not the id that users see: that may be another set's by the time the graph runs.
    return -1 if process_set.uid is None else process_set.uid


def _operator(row: Collective) -> Any:
    return getattr(torch.ops.horovod, row.name)


class _Past:
    """See `collectives.Past`: makes its calls by operators, and so ends up in backward graphs."""

    def __init__(
        self, process_set: int, grouped: bool, rows: list[int], received: Sequence[torch.Tensor]
    ) -> None:
        self._head = (None, grouped, process_set)
        self.process_set = process_sets.registered(process_set)
        self.rows = rows
        self.received = received

    def call(self, row: Collective, tensors: Tensors, *arguments: Any) -> Tensors:
        outputs: Tensors = _operator(row)(list(tensors), *self._head, *arguments)
        return outputs


def _run(
    row: Collective,
    tensors: Tensors,
    name: str | None,
    grouped: bool,
    process_set: int,
    *arguments: Any,
) -> list[torch.Tensor]:
    members = process_sets.registered(process_set)
    with Call(row.op, name, members, grouped=grouped) as call:
        return list(row.run(call, tensors, *arguments))


def _empty(
    row: Collective,
    tensors: Tensors,
    name: str | None,
    grouped: bool,
    process_set: int,
    *arguments: Any,
) -> list[torch.Tensor]:
    return row.empty(torch.library.get_ctx().new_dynamic_size, tensors, *arguments)


def _setup(row: Collective, ctx: Any, inputs: Any, output: Any) -> None:
    tensors, _, ctx.grouped, ctx.process_set, *ctx.arguments = inputs
    ctx.rows = rows_of(tensors)
    if row.keeps:
        ctx.save_for_backward(*output[1:])


def _gradient(row: Collective, ctx: Any, grads: Tensors) -> Any:
    past = _Past(ctx.process_set, ctx.grouped, ctx.rows, ctx.saved_tensors)
    grads = row.gradient(past, grads, *ctx.arguments)
    return (list(grads), None, None, None, *(None for _ in ctx.arguments))


def define(name: str, schema: str, run: Any, empty: Any) -> str:
    """Adds an operator with effects, of which `schema` lacks the name; gives its full name."""
    _library.define(f"{name}({schema}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    operator = f"horovod::{name}"
    torch.library.register_fake(operator, empty, lib=_library)
    _order(operator)
    return operator


def _order(operator: str) -> None:
    """Has the operator run in program order, where this version of torch can be asked to."""
    try:
        from torch._library.effects import EffectType
        from torch.library import _register_effectful_op
    except ImportError:
        return
    _register_effectful_op(operator, EffectType.ORDERED, lib=_library)


def _define_all() -> None:
    for row in COLLECTIVES:
        schema = f"{_HEAD}, {row.schema}) -> Tensor[]"
        operator = define(row.name, schema, partial(_run, row), partial(_empty, row))
        torch.library.register_autograd(
            operator, partial(_gradient, row), setup_context=partial(_setup, row), lib=_library
        )


if TRACEABLE:
    _define_all()
