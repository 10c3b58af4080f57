"""The operations and the operators that run them, as a table; must not know how one is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod.common import ops
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


@dataclass(frozen=True)
class Row:
    """One operation and the operators that run it."""

    op: Op
    single: Callable[..., Any]
    grouped: Callable[..., Any] | None = None


ALLREDUCE = Row(ops.ALLREDUCE, operators.horovod_allreduce, operators.horovod_grouped_allreduce)
ALLGATHER = Row(ops.ALLGATHER, operators.horovod_allgather, operators.horovod_grouped_allgather)
BROADCAST = Row(ops.BROADCAST, operators.horovod_broadcast)
ALLTOALL = Row(ops.ALLTOALL, operators.horovod_alltoall)
REDUCESCATTER = Row(
    ops.REDUCESCATTER, operators.horovod_reducescatter, operators.horovod_grouped_reducescatter
)
