"""The operations and the operators that run them, as a table; must not know how one is called."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod.common import basics, ops
from horovod.common.ops import Op, ReduceOp
from horovod.tensorflow.native import operators

Tensors = Sequence[tf.Tensor]


@dataclass(frozen=True)
class Arguments:
    """What a collective is told besides its tensors."""

    reduce_op: int = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: Any = None
    """An alltoall's, or what can be converted to them; empty for equal parts."""
    rows: tuple[int | None, ...] = ()
    """How many rows an allgather gives, by tensor, where that is known beforehand."""


def bits(factor: float) -> int:
    """A double as the integer with the same bits, which is how it reaches native code."""
    return int(struct.unpack("q", struct.pack("d", float(factor)))[0])


def from_bits(number: int) -> float:
    """The inverse of `bits`."""
    return float(struct.unpack("d", struct.pack("q", number))[0])


def ranks_of(process_set: int) -> list[int]:
    """The global ranks in the set of this number, ascending."""
    return list(basics.engine().process_sets()[process_set])


@dataclass(frozen=True)
class Row:
    """One operation and the operators that run it."""

    op: Op
    single: Callable[..., Any]
    grouped: Callable[..., Any] | None = None

    def operator(self, *, grouped: bool) -> str:
        """The name of the operator, which the texts of errors start with."""
        return f"Horovod{'Grouped' if grouped else ''}{self.op.name.capitalize()}"


ALLREDUCE = Row(ops.ALLREDUCE, operators.horovod_allreduce, operators.horovod_grouped_allreduce)
ALLGATHER = Row(ops.ALLGATHER, operators.horovod_allgather, operators.horovod_grouped_allgather)
BROADCAST = Row(ops.BROADCAST, operators.horovod_broadcast)
ALLTOALL = Row(ops.ALLTOALL, operators.horovod_alltoall)
REDUCESCATTER = Row(
    ops.REDUCESCATTER, operators.horovod_reducescatter, operators.horovod_grouped_reducescatter
)
ROWS = (ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER)


@dataclass(frozen=True)
class Made:
    """A call that was made, as its gradient needs to know it."""

    row: Row
    grouped: bool
    process_set: int
    arguments: Arguments
    inputs: Tensors
    outputs: Tensors
