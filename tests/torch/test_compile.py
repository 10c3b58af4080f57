"""Collectives and optimizers in compiled functions do what they do eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd

BACKEND = (
    "aot_eager"  # traces, differentiates and partitions as inductor does, and compiles nothing
)


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return torch.compile(function, backend=BACKEND, fullgraph=True, **options)


def every_collective(x: torch.Tensor) -> torch.Tensor:
    """One number from all of them; the rows of what is gathered are known at run time alone."""
    n = hvd.size()
    hvd.allreduce(x)  # not used, and still a call
    total = (hvd.allreduce(x) * hvd.allreduce(x)).sum()  # two calls that look alike
    total = total + hvd.allreduce(x * 2, average=False, prescale_factor=0.5, name="scaled").sum()
    total = total + hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum).square().sum()
    first, second = hvd.grouped_allreduce([x, x.t() * 3], op=hvd.Sum)
    total = total + (first * second.t()).sum()
    total = total + hvd.allgather(x[: 1 + hvd.rank()]).square().sum()
    total = total + sum(part.square().sum() for part in hvd.grouped_allgather([x, x.t()]))
    total = total + hvd.broadcast(x, n - 1).square().sum()
    output, received = hvd.alltoall(x, [1] * n)
    total = total + output.square().sum() * received.sum()
    total = total + hvd.alltoall(x[: 2 * n]).square().sum()
    total = total + hvd.reducescatter(x, op=hvd.Sum, postscale_factor=2.0).square().sum()
    return total + sum(part.square().sum() for part in hvd.grouped_reducescatter([x, x.t()]))


def own(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hvd.rank())
    return torch.randn(rows, 3, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.np(2)
def test_every_collective_gives_the_eager_results_and_gradients() -> None:
    x = own(7)
    wanted = every_collective(x)
    (gradient,) = torch.autograd.grad(wanted, x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = compiled(every_collective)
        result = graph(x)
        (found,) = torch.autograd.grad(result, x)
        torch.testing.assert_close(result, wanted, rtol=1e-14, atol=0.0)
        torch.testing.assert_close(found, gradient, rtol=1e-14, atol=1e-14)
        # A rank that compiles makes the calls that a rank makes that doesn't.
        with torch.no_grad():
            mixed = graph(x) if hvd.rank() == 0 else every_collective(x)
        torch.testing.assert_close(mixed, wanted.detach(), rtol=1e-14, atol=0.0)


@pytest.mark.np(2)
def test_in_place_forms_and_process_sets() -> None:
    alone = hvd.add_process_set([0])
    other = hvd.add_process_set([1])
    mine = (alone, other)[hvd.rank()]

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hvd.allreduce_(x, op=hvd.Sum)
        hvd.grouped_allreduce_([y, x], op=hvd.Max)
        hvd.broadcast_(y, 1)
        return hvd.allreduce(x, op=hvd.Sum, process_set=mine) + y

    results = []
    for f in (function, compiled(function)):
        x, y = (torch.full((3,), 1.0 + hvd.rank() + k) for k in range(2))
        results.append((f(x, y), x, y))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    hvd.remove_process_set(alone)
    hvd.remove_process_set(other)


@pytest.mark.np(2)
def test_errors_in_a_graph_are_those_of_eager_calls() -> None:
    def ragged(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x, name="ragged")

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x, op=99)

    for function, error in ((ragged, hvd.HorovodInternalError), (wrong, ValueError)):
        with pytest.raises(error):
            compiled(function)(torch.ones(2 + hvd.rank()))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    model = nn.Sequential(*layers).double()
    model[3].bias.requires_grad_(False)
    model.unused = nn.Linear(2, 2).double()
    return model


def train(wrap: Callable[[nn.Module], nn.Module], passes: int = 1) -> torch.Tensor:
    """The model after a few steps, as one vector."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), backward_passes_per_step=passes
    )
    wrapped = wrap(model)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
            wrapped(x).square().sum().backward()
        optimizer.step()
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


@pytest.mark.np(2)
def test_a_compiled_model_trains_as_an_eager_one() -> None:
    for passes in (1, 2):
        wanted = train(lambda model: model, passes)
        found = train(compiled, passes)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
