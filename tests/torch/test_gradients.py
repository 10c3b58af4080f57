"""Gradients of the differentiable collectives, as the compatibility table states them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import horovod.torch as hvd
from horovod.common.ops import pending_calls


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


class Collective(NamedTuple):
    """A linear function of two tensors, of whose outputs every rank has some."""

    rule: Callable[[int], float]
    """What the stated gradient is, times the derivative of the sum of all ranks' losses."""
    run: Callable[..., Any]


def once(n: int) -> float:
    return 1.0


def mean(n: int) -> float:
    return 1.0 / n


def times_size(n: int) -> float:
    return float(n)


def splits(options: dict[str, Any]) -> list[int]:
    """One row for the first member, two for the next, and so on; one is left over."""
    return [i + 1 for i in range(options["process_set"].size())]


HALF = {"compression": hvd.Compression.fp16}
BRAIN = {"compression": hvd.Compression.bf16}
SCALED = {"prescale_factor": 0.5, "postscale_factor": 3.0}
LINEAR: dict[str, Collective] = {
    "allreduce": Collective(once, lambda a, b, **o: [hvd.allreduce(a, **o), hvd.allreduce(b, **o)]),
    "allreduce Sum": Collective(
        once,
        lambda a, b, **o: [hvd.allreduce(a, op=hvd.Sum, **o), hvd.allreduce(b, op=hvd.Sum, **o)],
    ),
    "allreduce scaled": Collective(once, lambda a, b, **o: [hvd.allreduce(a * a, **SCALED, **o)]),
    "allreduce fp16": Collective(
        once, lambda a, b, **o: [hvd.allreduce(a.t(), op=hvd.Sum, **HALF, **o)]
    ),
    "allreduce bf16": Collective(
        once, lambda a, b, **o: [hvd.allreduce(a, op=hvd.Sum, **BRAIN, **o)]
    ),
    "grouped_allreduce": Collective(once, lambda a, b, **o: hvd.grouped_allreduce([a, b], **o)),
    "grouped_allreduce scaled": Collective(
        once, lambda a, b, **o: hvd.grouped_allreduce([a, b * b], op=hvd.Sum, **SCALED, **o)
    ),
    "grouped_allreduce fp16": Collective(
        once, lambda a, b, **o: hvd.grouped_allreduce([b, a], op=hvd.Sum, **HALF, **o)
    ),
    "allgather": Collective(
        mean, lambda a, b, **o: [hvd.allgather(a, **o), hvd.allgather(b[: hvd.rank()], **o)]
    ),
    "grouped_allgather": Collective(
        mean, lambda a, b, **o: hvd.grouped_allgather([a, b[: hvd.rank() + 1]], **o)
    ),
    "broadcast": Collective(
        mean, lambda a, b, **o: [hvd.broadcast(a, 0, **o), hvd.broadcast(b, root_of(o), **o)]
    ),
    "alltoall": Collective(
        once, lambda a, b, **o: [hvd.alltoall(a, **o), hvd.alltoall(b, splits(o), **o)[0]]
    ),
    "reducescatter": Collective(
        times_size,
        lambda a, b, **o: [hvd.reducescatter(a, **o), hvd.reducescatter(b, op=hvd.Sum, **o)],
    ),
    "reducescatter scaled": Collective(
        times_size, lambda a, b, **o: [hvd.reducescatter(a, op=hvd.Sum, **SCALED, **o)]
    ),
    "reducescatter fp16": Collective(
        times_size, lambda a, b, **o: [hvd.reducescatter(a, op=hvd.Sum, **HALF, **o)]
    ),
    "grouped_reducescatter": Collective(
        times_size, lambda a, b, **o: hvd.grouped_reducescatter([a, b], **o)
    ),
    "grouped_reducescatter scaled": Collective(
        times_size, lambda a, b, **o: hvd.grouped_reducescatter([a, b], op=hvd.Sum, **SCALED, **o)
    ),
}


def root_of(options: dict[str, Any]) -> int:
    return int(options["process_set"].ranks[-1])


def numerical(
    loss: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor],
    directions: list[list[torch.Tensor]],
    process_set: hvd.ProcessSet,
) -> list[float]:
    """How the sum of all members' losses changes if this rank moves its tensors in each direction.

    By central differences one apart, exact for functions of degree two.
    """
    mine: list[float] = []
    for member in process_set.ranks or ():
        for direction in directions:
            change = torch.zeros((), dtype=torch.float64)
            for sign in (1, -1):
                step = sign * (member == hvd.rank())
                change += (
                    sign * loss([t + step * d for t, d in zip(tensors, direction, strict=True)]) / 2
                )
            total = hvd.allreduce(change, op=hvd.Sum, process_set=process_set)
            if member == hvd.rank():
                mine.append(total.item())
    return mine


@pytest.mark.np(1, 2, 3)
def test_gradients_are_the_numerical_ones_by_the_stated_rule() -> None:
    world = hvd.global_process_set
    pair = hvd.add_process_set([0, 2]) if hvd.size() == 3 else world
    for process_set in [world, pair] if pair is not world else [world]:
        if hvd.rank() not in (process_set.ranks or ()):
            continue
        n = process_set.size()
        generator = torch.Generator().manual_seed(hvd.rank())
        rows = n * (n + 1) // 2 + 1  # as `splits` has it
        for name, collective in LINEAR.items():

            def whole(*shape: int, given: torch.Generator = generator) -> torch.Tensor:
                # small whole numbers: differences and 16-bit floats are exact
                return torch.randint(-4, 5, shape, generator=given).double()

            tensors = [whole(2 * n), whole(rows)]
            options = {"process_set": process_set}
            weights = [whole(*output.shape) for output in collective.run(*tensors, **options)]

            def loss(
                given: list[torch.Tensor],
                run: Callable[..., Any] = collective.run,
                weights: list[torch.Tensor] = weights,
                options: dict[str, Any] = options,
            ) -> torch.Tensor:
                outputs = run(*given, **options)
                return sum(
                    ((w * output).sum() for w, output in zip(weights, outputs, strict=True)),
                    torch.zeros((), dtype=torch.float64),
                )

            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            grads = torch.autograd.grad(loss(leaves), leaves, materialize_grads=True)
            directions = [[whole(*tensor.shape) for tensor in tensors] for _ in range(3)]
            wanted = numerical(loss, tensors, directions, process_set)
            for direction, want in zip(directions, wanted, strict=True):
                actual = sum((g * d).sum().item() for g, d in zip(grads, direction, strict=True))
                assert actual == pytest.approx(collective.rule(n) * want, rel=1e-9, abs=1e-9), name
    if pair is not world:
        hvd.remove_process_set(pair)


@pytest.mark.np(2, 3)
def test_other_reductions_reduce_the_gradient_alike() -> None:
    w = weights(4, 3)
    stack = torch.stack(w)
    for op, wanted in (
        (hvd.Min, stack.amin(0)),
        (hvd.Max, stack.amax(0)),
        (hvd.Product, stack.prod(0)),
    ):
        x = leaf(4, 3)
        close(gradient(hvd.allreduce(x, op=op), x, w[hvd.rank()]), wanted)
        close(gradient(hvd.grouped_allreduce([x], op=op)[0], x, w[hvd.rank()]), wanted)


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


@pytest.mark.np(2)
def test_gradients_of_allgather_take_no_numbers_of_unnamed_allgathers() -> None:
    x = leaf(1 + hvd.rank())

    def number() -> int:
        handle = hvd.allgather_async(x.detach())
        name = pending_calls[handle]
        hvd.synchronize(handle)
        return int(name.removeprefix("allgather.noname."))

    before = number()
    hvd.allgather(x, name="named").sum().backward()
    assert number() == before + 1


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


COLLECTIVES = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "allgather": hvd.allgather,
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": lambda x: hvd.alltoall(x, [1, 2])[0],
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
}


@pytest.mark.np(2)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_second_derivatives(name: str) -> None:
    """The collectives are linear: those of its cube are 6 y, there and back."""
    f = COLLECTIVES[name]
    x, v = leaf(4, 2), leaf(4, 2).detach()
    y = f(x)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), x)
    # The adjoint of the adjoint, which is scaled where what is averaged was copied before.
    z = y.detach().requires_grad_()
    (back,) = torch.autograd.grad(f(x), x, z, create_graph=True)
    (twice,) = torch.autograd.grad((back * v).sum(), z)
    (wanted,) = torch.autograd.grad(f(x), x, twice * 6 * y.detach())
    close(second, wanted)

    def cube(x: torch.Tensor) -> torch.Tensor:
        return (f(x) ** 3).sum()

    close(torch.func.grad(cube)(x.detach()), first.detach())


@pytest.mark.np(2)
def test_vmap_is_refused() -> None:
    with pytest.raises(ValueError, match="no memory of its own"):
        torch.vmap(hvd.allreduce)(torch.ones(2, 3))


@pytest.mark.np(1)
def test_what_is_not_differentiable() -> None:
    x = leaf(3)
    for handle in (hvd.allreduce_async(x), hvd.allgather_async(x), hvd.broadcast_async(x, 0)):
        assert not hvd.synchronize(handle).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
