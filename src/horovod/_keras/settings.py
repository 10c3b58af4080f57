"""What a distributed optimizer was told; must not know any framework."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from horovod.common import ops
from horovod.common.ops import ReduceOp
from horovod.common.process_sets import ProcessSet


@dataclass(frozen=True)
class Settings:
    """The arguments of ``DistributedOptimizer``, checked."""

    name: str | None
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: ReduceOp
    backward_passes_per_step: int
    average_aggregated_gradients: bool
    groups: Any
    process_set: ProcessSet
    scale_local_gradients: bool


def checked(
    *,
    op: int,
    gradient_predivide_factor: float,
    backward_passes_per_step: int,
    num_groups: int,
    groups: Any,
    **others: Any,
) -> Settings:
    """Makes settings of arguments.

    Raises:
        ValueError: an argument is wrong, or two don't go together.
    """
    chosen = ops.reduce_op(op, None)
    if chosen not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"Keras optimizers reduce with op Average or Sum, not {chosen.name}")
    if gradient_predivide_factor != 1.0 and chosen is not ReduceOp.Average:
        raise ValueError("gradient_predivide_factor works with op=Average only")
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}"
        )
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=4)
        groups = num_groups if groups is None else groups
    return Settings(
        op=chosen,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        groups=_grouping(groups),
        **others,
    )


def _grouping(groups: Any) -> Any:
    if groups is None:
        return None
    if isinstance(groups, (list, tuple)):
        return tuple(tuple(group) for group in groups)
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    raise ValueError(
        f"groups must be a positive number or a list of lists of variables, not {groups!r}"
    )
