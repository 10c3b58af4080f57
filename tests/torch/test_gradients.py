"""Gradients of the differentiable collectives, as the compatibility table states them."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hvd.rank())
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def gradient(output: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (result,) = torch.autograd.grad((output * weight).sum(), tensor)
    return result


def weights(*shape: int) -> list[torch.Tensor]:
    """The incoming gradient of every rank."""
    made = []
    for rank in range(hvd.size()):
        generator = torch.Generator().manual_seed(50 + rank)
        made.append(torch.randn(shape, dtype=torch.float64, generator=generator))
    return made


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.np(1, 2, 3)
def test_allreduce() -> None:
    w = weights(4, 3)
    x = leaf(4, 3)
    mine = w[hvd.rank()]
    total = sum(w)
    close(gradient(hvd.allreduce(x, op=hvd.Sum), x, mine), total)
    close(gradient(hvd.allreduce(x), x, mine), total / hvd.size())
    scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    close(gradient(scaled, x, mine), 1.5 * total)
    y = leaf(4, 3)
    results = hvd.grouped_allreduce([x, y.t()], op=hvd.Sum)
    close(gradient(results[0], x, mine), total)
    close(gradient(hvd.grouped_allreduce([x, y.t()])[1], y, mine.t()), total / hvd.size())


@pytest.mark.np(2)
def test_compression_casts_gradients_back() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        x = leaf(4, dtype=torch.float32)
        output = hvd.allreduce(x, op=hvd.Sum, compression=compression)
        assert output.dtype is torch.float32
        output.sum().backward()
        assert torch.equal(x.grad, torch.full((4,), 2.0))
        scattered = hvd.reducescatter(x, op=hvd.Sum, compression=compression)
        assert scattered.dtype is torch.float32 and scattered.requires_grad
        whole = torch.ones(3, dtype=torch.int32)
        assert hvd.allreduce(whole, op=hvd.Sum, compression=compression).tolist() == [2, 2, 2]


@pytest.mark.np(1, 2, 3)
def test_allgather_gives_each_rank_its_rows_of_the_mean() -> None:
    n, r = hvd.size(), hvd.rank()
    rows = [rank + 1 for rank in range(n)]
    start = sum(rows[:r])
    w = weights(sum(rows), 2)
    x = leaf(rows[r], 2)
    wanted = (sum(w) / n)[start : start + rows[r]]
    close(gradient(hvd.allgather(x), x, w[r]), wanted)
    first, second = hvd.grouped_allgather([x, x * 2])
    close(gradient(first + second, x, w[r]), 3 * wanted)


@pytest.mark.np(1, 2, 3)
def test_broadcast_gives_the_root_the_mean() -> None:
    n, r = hvd.size(), hvd.rank()
    w = weights(3)
    for root in range(n):
        x = leaf(3)
        wanted = sum(w) / n if r == root else torch.zeros(3, dtype=torch.float64)
        close(gradient(hvd.broadcast(x, root), x, w[r]), wanted)


@pytest.mark.np(1, 2, 3)
def test_alltoall_sends_gradients_back() -> None:
    n, r = hvd.size(), hvd.rank()
    splits = [d + 1 for d in range(n)]
    x = leaf(sum(splits) + 1, 2)
    output, received = hvd.alltoall(x, splits)
    assert not received.requires_grad
    # Each row is marked with the rank that received it.
    wanted = torch.tensor([float(d) for d in range(n) for _ in range(splits[d])] + [0.0])
    close(gradient(output, x, torch.full_like(output, r)), wanted.double()[:, None].expand(-1, 2))
    y = leaf(2 * n)
    close(gradient(hvd.alltoall(y), y, torch.ones(2 * n)), torch.ones(2 * n).double())


@pytest.mark.np(1, 2, 3)
def test_reducescatter() -> None:
    n, r = hvd.size(), hvd.rank()
    rows = 2 * n + 1
    share = [rows // n + (rank < rows % n) for rank in range(n)]
    parts = [w[: share[rank]] for rank, w in enumerate(weights(rows, 2))]
    whole = torch.cat(parts)
    x = leaf(rows, 2)
    mine = parts[r].clone()
    close(gradient(hvd.reducescatter(x, op=hvd.Average), x, mine), whole)
    close(gradient(hvd.reducescatter(x, op=hvd.Sum), x, mine), n * whole)
    scaled = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    close(gradient(scaled, x, mine), 1.5 * n * whole)
    close(mine, parts[r])  # the incoming gradient isn't touched
    first, second = hvd.grouped_reducescatter([x, x * 2], op=hvd.Average)
    close(gradient(first + second, x, mine), 3 * whole)


@pytest.mark.np(2)
def test_second_derivatives() -> None:
    x = leaf(3)
    (first,) = torch.autograd.grad((hvd.allreduce(x, op=hvd.Sum) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    total = hvd.allreduce(x.detach(), op=hvd.Sum)
    close(second, 2 * 2 * 6 * total)


@pytest.mark.np(1)
def test_what_is_not_differentiable() -> None:
    x = leaf(3)
    for handle in (hvd.allreduce_async(x), hvd.allgather_async(x), hvd.broadcast_async(x, 0)):
        assert not hvd.synchronize(handle).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
