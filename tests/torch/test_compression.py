"""Compression: a tensor comes back in its own type, and error feedback owes one residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.torch.compression import Compressor

CASTS = [hvd.Compression.fp16, hvd.Compression.bf16]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EXACT = [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128]


class Signs(Compressor[torch.Tensor]):
    """A user's own, as lossy as can be: signs and one magnitude."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.sgn() * tensor.abs().mean(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class Seen:
    """A user's own, an object: records what it is given to compress."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.last = torch.empty(0)

    def compress(self, tensor: torch.Tensor) -> Any:
        self.last = tensor.clone()
        return self.inner.compress(tensor)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> Any:
        return self.inner.decompress(tensor, ctx)


def send(compression: Any, tensor: torch.Tensor) -> torch.Tensor:
    restored: torch.Tensor = compression.decompress(*compression.compress(tensor))
    assert restored.dtype is tensor.dtype
    assert restored.shape == tensor.shape
    return restored


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("inner", [hvd.Compression.none, *CASTS])
def test_only_floats_are_narrowed_and_everything_returns_in_its_type(
    inner: Any, feedback: bool
) -> None:
    compression = hvd.Compression.error_feedback(inner) if feedback else inner
    for dtype in FLOATS + EXACT:
        tensor = torch.tensor([0.0, 1.0, 1.0009765625]).to(dtype)
        restored = send(compression, tensor)
        wire = compression.compress(tensor)[0]
        assert wire.element_size() <= tensor.element_size()
        if dtype in EXACT or tensor.element_size() == 2 or inner is hvd.Compression.none:
            assert wire.dtype is dtype
            assert torch.equal(restored, tensor)
        else:
            assert wire.element_size() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("inner", [*CASTS, Signs, Signs()])
def test_what_was_sent_and_one_residual_sum_up_to_all(inner: Any, dtype: torch.dtype) -> None:
    if dtype.is_complex and not isinstance(inner, Signs):
        inner = hvd.Compression.none
    seen = Seen(inner)
    feedback = hvd.Compression.error_feedback(seen)
    generator = torch.Generator().manual_seed(1)
    terms = torch.randn(100, 50, generator=generator, dtype=dtype)
    before = terms.clone()
    sent = sum(send(feedback, term).to(torch.complex128) for term in terms)
    send(feedback, torch.zeros_like(terms[0]))
    torch.testing.assert_close(
        sent + seen.last.to(torch.complex128), terms.to(torch.complex128).sum(0), rtol=0, atol=1e-4
    )
    assert torch.equal(terms, before)
    if inner in CASTS:
        half_a_step = 2.0**-11 if inner is hvd.Compression.fp16 else 2.0**-8
        assert 0 < seen.last.abs().max() <= half_a_step * 1.01 * terms.abs().max()


def test_each_name_has_its_own_residual() -> None:
    small = torch.full((2,), 1.0e-8)  # float16 can't hold it, but can hold its fivefold
    feedback = hvd.Compression.error_feedback(hvd.Compression.fp16)
    one, other = feedback.bind("one"), feedback.bind("other")
    assert feedback.bind("one") is one
    for _ in range(2):
        assert send(one, small).eq(0).all()
    assert send(other, small).eq(0).all()
    assert send(feedback, small).eq(0).all()
    assert send(one, small).gt(0).all()


def test_a_decorator_binds_what_it_decorates() -> None:
    inner = hvd.Compression.error_feedback(hvd.Compression.fp16)
    outer = hvd.Compression.error_feedback(inner).bind("one")
    send(outer, torch.full((2,), 1.0e-8))
    assert set(inner._bound) == {"one"}


def test_the_residual_starts_anew_where_the_tensor_changes() -> None:
    feedback = hvd.Compression.error_feedback(Signs)
    send(feedback, torch.tensor([1.0, 3.0]))
    assert send(feedback, torch.tensor([1.0, 2.0, 3.0])).tolist() == [2.0, 2.0, 2.0]
    assert send(feedback, torch.tensor([1.0, 2.0, 3.0]).double()).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e6])
def test_an_overflow_is_seen_once_and_not_carried_on(bad: float) -> None:
    feedback = hvd.Compression.error_feedback(hvd.Compression.fp16)
    first = send(feedback, torch.tensor([bad, 1.0]))
    assert not first[0].isfinite()
    assert send(feedback, torch.tensor([1.0, 1.0])).tolist() == [1.0, 1.0]


@pytest.mark.np(2)
def test_calls_bind_by_name_and_groups_by_place() -> None:
    feedback = hvd.Compression.error_feedback(hvd.Compression.fp16)
    small, large = torch.full((2,), 1.0e-8), torch.full((2,), 2.0e-8)
    sums = {name: torch.zeros(2) for name in ("small", "large")}
    for _ in range(10):
        for name, tensor in (("small", small), ("large", large)):
            sums[name] += hvd.allreduce(tensor, name=f"feedback.{name}", compression=feedback)
    grouped = [torch.zeros(2), torch.zeros(2)]
    for _ in range(10):
        outputs = hvd.grouped_allreduce([small, large], name="feedback", compression=feedback)
        grouped = [total + output for total, output in zip(grouped, outputs, strict=True)]
    step = 2.0**-24  # the smallest number of float16
    for result in (list(sums.values()), grouped):
        torch.testing.assert_close(result[0], 10 * small, rtol=0, atol=step)
        torch.testing.assert_close(result[1], 10 * large, rtol=0, atol=step)


@pytest.mark.np(2)
def test_feedback_converges_where_rounding_stalls() -> None:
    """Gradients below what float16 can hold: 1e-8 (w - target)."""
    ends = {}
    for kind, compression in {
        "plain": hvd.Compression.fp16,
        "feedback": hvd.Compression.error_feedback(hvd.Compression.fp16),
    }.items():
        weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights.values(), lr=4e6),
            weights.items(),
            compression=compression,
            op=hvd.Sum,  # the reduced gradient isn't rounded again
        )
        target = 2.0 * hvd.rank()
        for _ in range(80):
            optimizer.zero_grad()
            off = (weights["a"] - target).square() + (weights["b"] + 1).square()
            (0.5e-8 * off.sum()).backward()
            optimizer.step()
        ends[kind] = [*weights["a"].tolist(), *weights["b"].tolist()]
    assert ends["plain"] == [0.0] * 4
    assert ends["feedback"] == pytest.approx([1.0, 1.0, -1.0, -1.0], abs=0.4)
