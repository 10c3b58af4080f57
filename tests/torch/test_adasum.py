"""Adasum of torch tensors: every form of allreduce, and its gradient. Knows no law of its own."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd
from reference import adasum

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def tensors(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """Of every rank."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn((hvd.size(), *shape), generator=generator, dtype=torch.float64)
    return [(common + each).to(dtype) for each in noise]


def check(actual: torch.Tensor, terms: list[torch.Tensor]) -> None:
    wanted = adasum(terms)
    tolerance = max(1e-12, torch.finfo(actual.dtype).eps)
    assert actual.dtype is terms[0].dtype
    torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=1e-7)


@pytest.mark.np(1, 2, 3, 4)
def test_allreduce_in_every_form() -> None:
    rank = hvd.rank()
    for dtype in FLOATS:
        terms = tensors(17, 5, dtype=dtype)
        check(hvd.allreduce(terms[rank], op=hvd.Adasum), terms)
        check(hvd.synchronize(hvd.allreduce_async(terms[rank], op=hvd.Adasum)), terms)
        x = terms[rank].clone()
        assert hvd.allreduce_(x, op=hvd.Adasum) is x
        check(x, terms)
        # Column by column in memory: products are summed in another order.
        check(hvd.allreduce(terms[rank].t(), op=hvd.Adasum).t(), terms)
    groups = [tensors(9, dtype=dtype, seed=1) for dtype in FLOATS]
    mine = [terms[rank].clone() for terms in groups]
    for result, terms in zip(hvd.grouped_allreduce(mine, op=hvd.Adasum), groups, strict=True):
        check(result, terms)
        assert torch.equal(result, hvd.allreduce(terms[rank], op=hvd.Adasum))
    hvd.grouped_allreduce_(mine, op=hvd.Adasum)
    for result, terms in zip(mine, groups, strict=True):
        check(result, terms)


@pytest.mark.np(2, 3)
def test_factors_and_compression() -> None:
    terms = tensors(33, dtype=torch.float32)
    x = terms[hvd.rank()]
    got = hvd.allreduce(x, op=hvd.Adasum, prescale_factor=3.0, postscale_factor=0.5)
    torch.testing.assert_close(got.double(), 1.5 * adasum(terms), rtol=1e-6, atol=1e-6)
    got = hvd.allreduce(x, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert got.dtype is torch.float32
    check(got.half(), [term.half() for term in terms])


@pytest.mark.np(3, 4)
def test_process_sets() -> None:
    terms = tensors(100)
    members = [0, hvd.size() - 1]
    ends = hvd.add_process_set(members)
    everyone = hvd.allreduce_async(terms[hvd.rank()], name="everyone", op=hvd.Adasum)
    if hvd.rank() in members:
        got = hvd.allreduce(terms[hvd.rank()], op=hvd.Adasum, process_set=ends)
        check(got, [terms[r] for r in members])
    check(hvd.synchronize(everyone), terms)
    hvd.remove_process_set(ends)


@pytest.mark.np(2, 3)
def test_the_gradient_is_reduced_the_same_way() -> None:
    rank = hvd.rank()
    incoming = tensors(4, 3, seed=2)
    x = tensors(4, 3)[rank].requires_grad_()
    scaled = hvd.allreduce(x, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0)
    scaled.backward(incoming[rank])
    torch.testing.assert_close(x.grad, 1.5 * adasum(incoming), rtol=1e-12, atol=1e-12)
    y = tensors(4, 3)[rank].requires_grad_()
    hvd.grouped_allreduce([y], op=hvd.Adasum)[0].backward(incoming[rank])
    torch.testing.assert_close(y.grad, adasum(incoming), rtol=1e-12, atol=1e-12)


@pytest.mark.np(2)
def test_what_has_no_adasum_says_so() -> None:
    with pytest.raises(ValueError, match=r"Adasum.*int32"):
        hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum)
    with pytest.raises(hvd.HorovodInternalError, match="Adasum"):
        hvd.reducescatter(torch.ones(4), op=hvd.Adasum)
