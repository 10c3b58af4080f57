"""Sparse tensors are reduced as their dense forms would be, and disagreement is never silent."""

from __future__ import annotations

import itertools

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64]
SHAPES = [((5,), 1), ((4, 3), 1), ((4, 3), 2), ((4, 3, 2), 2)]  # size, sparse dimensions


def made(rank: int, size: tuple[int, ...], dims: int, nnz: int, dtype: torch.dtype) -> torch.Tensor:
    """An uncoalesced tensor of small whole numbers, whose sums are exact in every data type."""
    random = torch.Generator().manual_seed(rank)
    indices = torch.stack([torch.randint(n, (nnz,), generator=random) for n in size[:dims]])
    values = torch.randint(-9, 9, (nnz, *size[dims:]), generator=random).to(dtype)
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)


@pytest.mark.np(1, 3)
def test_the_result_is_that_of_the_dense_tensors() -> None:
    n = hvd.size()
    for dtype, (size, dims) in itertools.product(DTYPES, SHAPES):
        for nnz in ([0] * n, [7] * n, [5 * rank for rank in range(n)]):
            mine = made(hvd.rank(), size, dims, nnz[hvd.rank()], dtype)
            dense = mine.to_dense()
            for op in (hvd.Sum, hvd.Average):
                result = hvd.sparse_allreduce(mine, op=op)
                assert result.layout is torch.sparse_coo and result.dtype is dtype
                assert (result.sparse_dim(), result.dense_dim()) == (dims, len(size) - dims)
                # a division by 3 may round once more or less
                torch.testing.assert_close(result.to_dense(), hvd.allreduce(dense, op=op))
            assert torch.equal(mine.to_dense(), dense)


@pytest.mark.np(2)
def test_forms_of_the_call() -> None:
    own = torch.ones(4, 2).triu(hvd.rank()).to_sparse(1)
    wanted = torch.ones(4, 2).triu() + torch.ones(4, 2).triu(1)
    waits = [hvd.sparse_allreduce_async(own, f"form.{op}", op) for op in (4, hvd.Min, hvd.Sum)]
    for wait in reversed(waits):
        assert torch.equal(wait().to_dense(), wanted)
        assert wait() is wait()
    mean = hvd.sparse_allreduce_async(own, "form", hvd.Average)()
    assert torch.equal(2 * mean.to_dense(), wanted)
    assert torch.equal(hvd.sparse_allreduce(own.bool(), op=hvd.Sum).to_dense(), wanted.bool())
    leaf = own.clone().requires_grad_()
    assert not hvd.sparse_allreduce(leaf, "leaf").requires_grad


@pytest.mark.np(3)
def test_a_process_set_divides_by_its_own_size() -> None:
    pair = hvd.add_process_set([0, 2])
    try:
        if pair.included():
            own = torch.eye(3)[hvd.rank()].to_sparse()
            mean = hvd.sparse_allreduce(own, "pair", hvd.Average, pair)
            assert mean.to_dense().tolist() == [0.5, 0.0, 0.5]
        else:
            with pytest.raises(ValueError, match="rank 1 is not in"):
                hvd.sparse_allreduce(torch.ones(3).to_sparse(), "pair", hvd.Average, pair)
    finally:
        hvd.remove_process_set(pair)


def cube(*size: int, dims: int | None = None) -> torch.Tensor:
    return torch.ones(size).to_sparse(dims or len(size))


def usable(name: str | None) -> None:
    assert hvd.sparse_allreduce(cube(2), name, hvd.Sum).to_dense().tolist() == [2.0, 2.0]


@pytest.mark.np(2)
def test_disagreement_is_an_error_on_every_rank() -> None:
    for tensor, op in (
        (cube(5, 3), hvd.Sum),
        (cube(4, 3), hvd.Average),
        (cube(4, 3, dims=1), hvd.Sum),
        (cube(4, 3, 2, dims=2), hvd.Sum),
        (cube(4), hvd.Sum),
        (cube(4, 3).double(), hvd.Sum),
    ):
        mine = (tensor, "off", op) if hvd.rank() else (cube(4, 3), "off", hvd.Sum)
        wait = hvd.sparse_allreduce_async(*mine)
        for _ in range(2):
            with pytest.raises(MismatchError, match=r"rank 0 .*rank 1|rank 1 .*rank 0"):
                wait()
        usable("off")


@pytest.mark.np(2)
def test_a_call_that_is_wrong_on_one_rank_fails_on_all() -> None:
    for kind, tensor, op in (
        (ValueError, torch.ones(4, 3), hvd.Sum),
        (ValueError, cube(4, 3).to_sparse_csr(), hvd.Sum),
        (ValueError, cube(4, 3), 17),
        (ValueError, cube(4, 3).bool(), hvd.Average),
        (TypeError, [1.0], hvd.Sum),
    ):
        for name in ("wrong", None):
            mine = (tensor, name, op) if hvd.rank() else (cube(4, 3), name, hvd.Sum)
            with pytest.raises(kind if hvd.rank() else MismatchError, match=name):
                hvd.sparse_allreduce(*mine)
            usable(name)


@pytest.mark.np(2)
def test_a_name_in_flight_is_refused() -> None:
    if hvd.rank():
        hvd.barrier()  # until then the other's call is in flight for sure
    wait = hvd.sparse_allreduce_async(cube(2), "twice", hvd.Sum)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="in flight"):
            hvd.sparse_allreduce_async(cube(2), "twice", hvd.Sum)
        hvd.barrier()
    assert wait().to_dense().tolist() == [2.0, 2.0]
    usable("twice")
