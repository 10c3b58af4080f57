"""metric_average is the mean over the whole data set, in one call, or an error on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError


@pytest.mark.np(1, 2, 3)
def test_uneven_shards_give_the_mean_of_the_whole() -> None:
    data = torch.arange(1.0, 12.0, dtype=torch.float64).square() / 3
    mine = data[hvd.rank() :: hvd.size()]
    metrics = {"tensor": mine.mean(), "number": float(mine.mean()), "whole": hvd.rank()}
    means = hvd.metric_average(metrics, weight=len(mine))
    assert list(means) == ["tensor", "number", "whole"]
    assert means["tensor"] == pytest.approx(float(data.mean()), rel=1e-15)
    assert means["number"] == pytest.approx(float(data.mean()), rel=1e-15)
    assert all(type(mean) is float for mean in means.values())
    assert hvd.allgather_object(means) == [means] * hvd.size()
    equal = hvd.metric_average({"rank": torch.tensor([hvd.rank()])}, name="mine")
    assert equal == {"rank": (hvd.size() - 1) / 2}
    assert hvd.metric_average({}) == {}


@pytest.mark.np(2, 3)
def test_weight_zero_has_no_say() -> None:
    metrics: dict[str, Any] = {"loss": 3.0, "accuracy": 0.5}
    for silent in ({}, {"loss": math.nan}, {"loss": math.inf, "other": 1}):
        if hvd.rank() == 0:
            assert hvd.metric_average(silent, weight=0) == metrics
        else:
            assert hvd.metric_average(metrics, weight=2.5) == metrics
    with pytest.raises(ValueError, match="weight is 0 on every rank"):
        hvd.metric_average(metrics, weight=0)


@pytest.mark.np(2)
def test_what_is_not_finite_passes_through() -> None:
    values = (math.nan, 1.0) if hvd.rank() else (1.0, math.inf)
    means = hvd.metric_average(dict(zip("ab", values, strict=True)))
    assert math.isnan(means["a"])
    assert means["b"] == math.inf


@pytest.mark.np(2, 3)
def test_names_that_differ_are_an_error_everywhere() -> None:
    own = {"loss": 1.0, "top1" if hvd.rank() else "top5": 2.0}
    with pytest.raises(
        MismatchError, match=r"only rank 0 has \['top5'\], only rank 1 has \['top1'"
    ):
        hvd.metric_average(own)
    assert hvd.metric_average({"loss": 1}) == {"loss": 1.0}


WRONG: dict[str, tuple[Any, float]] = {
    "weight must be 0 or more and finite, not -1": ({"loss": 1.0}, -1),
    "weight must be 0 or more and finite, not nan": ({"loss": 1.0}, math.nan),
    "metric 'pair' is not one number": ({"pair": torch.ones(2)}, 1),
    "metric 'text' is not one number": ({"text": "1.0"}, 1),
    "metric 'none' is not one number": ({"none": None}, 1),
    "a metric's name is text, not 1": ({1: 1.0}, 1),
}


@pytest.mark.np(2)
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(text: str) -> None:
    metrics, weight = WRONG[text]
    if hvd.rank() == 1:
        with pytest.raises((ValueError, TypeError), match=text):
            hvd.metric_average(metrics, weight)
    else:
        with pytest.raises(hvd.HorovodInternalError, match=text):
            hvd.metric_average({"loss": 1.0})
    assert hvd.metric_average({"loss": 1}) == {"loss": 1.0}


@pytest.mark.np(3)
def test_a_process_set_averages_its_members() -> None:
    some = hvd.add_process_set([0, 2])
    try:
        if some.included():
            assert hvd.metric_average({"rank": hvd.rank()}, process_set=some) == {"rank": 1.0}
    finally:
        hvd.remove_process_set(some)
