"""Averages metrics over ranks that saw different amounts of data; knows no model or optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from horovod.common import ops
from horovod.common.exceptions import MismatchError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.gather import gather_plain


def metric_average(
    metrics: Mapping[str, Any],
    weight: float = 1,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> dict[str, float]:
    """The weighted mean of each metric over the members: ``sum(weight * value) / sum(weight)``.

    With the number of samples behind the values as weights, the mean over uneven shards is that
    over the whole data set. Takes one collective, however many metrics there are, and blocks until
    every member has called it. Computed in float64; NaN and infinities pass through.

    Args:
        metrics: numbers or one-element tensors by name, the same names on all members. A member of
            weight 0 has no say: its values may be NaN and its names missing.
        weight: of this member's values, 0 or more, finite.
        process_set: who takes part.
        name: matches the call with those of the other members; without one, calls match in order.

    Returns:
        The means by name, equal on every member.

    Raises:
        ValueError: on every member: all weights are 0. Here, while the others get a
            HorovodInternalError: the weight is negative or not finite, or a value is no number.
        MismatchError: on every member: the names differ.
        HorovodInternalError: another member's argument is wrong, or one is lost.

    Source: the idea of ChainerMN's multi-node evaluator.
    """

    def plain() -> list[Any]:
        own = float(weight)
        if not (math.isfinite(own) and own >= 0):
            raise ValueError(f"weight must be 0 or more and finite, not {weight!r}")
        return [own, {_name(key): _number(key, value) for key, value in metrics.items()}]

    what = "metric_average" if name is None else f"metric_average.{name}"
    members = list(zip(ops.ranks(process_set), gather_plain(what, plain, process_set), strict=True))
    counted = [(rank, share, values) for rank, (share, values) in members if share > 0]
    if not counted:
        raise ValueError(f"{what}: the weight is 0 on every rank, so there is nothing to average")
    first, _, names = counted[0]
    for rank, _, values in counted[1:]:
        if values.keys() != names.keys():
            submitted = (
                f"only rank {first} has {sorted(names.keys() - values.keys())}, "
                f"only rank {rank} has {sorted(values.keys() - names.keys())}"
            )
            raise MismatchError(f"{what}: the metrics differ: {submitted}", submitted=submitted)
    total = sum(share for _, share, _ in counted)
    return {key: sum(share / total * values[key] for _, share, values in counted) for key in names}


def _name(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a metric's name is text, not {key!r}")
    return key


def _number(key: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text")
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metric {key!r} is not one number: {value!r}") from error
