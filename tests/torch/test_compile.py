"""Collectives and optimizers in compiled functions do what they do eagerly."""

from __future__ import annotations

import os
import tempfile
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


def reductions(x: torch.Tensor) -> torch.Tensor:
    """One number from all of them."""
    n = hvd.size()
    hvd.allreduce(x)  # not used, and still a call
    total = (hvd.allreduce(x) * hvd.allreduce(x)).sum()  # two calls that look alike
    total = total + hvd.allreduce(x * 2, average=False, prescale_factor=0.5, name="scaled").sum()
    total = total + hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum).square().sum()
    first, second = hvd.grouped_allreduce([x, x.t() * 3], op=hvd.Sum)
    total = total + (first * second.t()).sum() + hvd.broadcast(x, n - 1).square().sum()
    total = total + hvd.reducescatter(x, op=hvd.Sum, postscale_factor=2.0).square().sum()
    return total + sum(part.square().sum() for part in hvd.grouped_reducescatter([x, x.t()]))


def gathers(x: torch.Tensor) -> torch.Tensor:
    """One number from those whose rows are known at run time alone."""
    n = hvd.size()
    total = hvd.allgather(x[: 1 + hvd.rank()]).square().sum()
    total = total + sum(part.square().sum() for part in hvd.grouped_allgather([x, x.t()]))
    output, received = hvd.alltoall(x, [1] * n)
    total = total + output.square().sum() * received.sum()
    return total + hvd.alltoall(x[: 2 * n]).square().sum()


def own(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hvd.rank())
    return torch.randn(rows, 3, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.np(2)
@pytest.mark.parametrize("which", ["gathers", "reductions"])
def test_collectives_give_the_eager_results_and_gradients(which: str) -> None:
    function = {"reductions": reductions, "gathers": gathers}[which]
    x = own(7)
    wanted = function(x)
    (gradient,) = torch.autograd.grad(wanted, x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = compiled(function)
        result = graph(x)
        (found,) = torch.autograd.grad(result, x)
        torch.testing.assert_close(result, wanted, rtol=1e-14, atol=0.0)
        torch.testing.assert_close(found, gradient, rtol=1e-14, atol=1e-14)
        # A rank that compiles makes the calls that a rank makes that doesn't.
        with torch.no_grad():
            mixed = graph(x) if hvd.rank() == 0 else function(x)
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


def train(wrap: Callable[[nn.Module, Any], nn.Module], passes: int = 1) -> torch.Tensor:
    """The model after a few steps, as one vector."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), backward_passes_per_step=passes
    )
    wrapped = wrap(model, optimizer)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
            wrapped(x).square().sum().backward()
        optimizer.step()
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


@pytest.mark.np(2)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_compiled_model_trains_as_an_eager_one(passes: int, overlapped: bool) -> None:
    wanted = train(lambda model, _: model, passes)

    def wrap(model: nn.Module, optimizer: Any) -> Any:
        return compiled(hvd.overlap(model, optimizer) if overlapped else model)

    torch.testing.assert_close(train(wrap, passes), wanted, rtol=1e-12, atol=1e-12)


class Mark(torch.autograd.Function):
    """Notes when the gradient of its output is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ops.horovod_tests.note(gradient)


class Marked(nn.Module):
    """Notes when backward has come to the first of its layers, whose gradients are the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(Mark.apply(self.first(x)))


def trained(backend: str | None) -> tuple[list[torch.Tensor], list[Any]]:
    """The parameters after three steps, by themselves (None) or with `overlap`, and the events.

    Those are of the last backward pass: the mark, and the index of each parameter whose reduction
    was under way when its operator returned.
    """
    model = Marked()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = model
    events: list[Any] = []
    rows = torch.arange(8.0 * hvd.size()).sin().reshape(-1, 4)
    if backend is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        reducer, start = optimizer.reducer, optimizer.reducer.start_early

        def noted(index: int, gradient: torch.Tensor) -> None:
            start(index, gradient)
            if hvd.size() == 1 or reducer.parameters[index] in reducer.in_flight():
                events.append(index)

        reducer.start_early = noted
        rows = rows[2 * hvd.rank() : 2 * hvd.rank() + 2]
        torch._dynamo.reset()
        step = torch.compile(hvd.overlap(model, optimizer), backend=backend, fullgraph=True)
    library = torch.library.Library("horovod_tests", "DEF")
    library.define("note(Tensor x) -> Tensor")
    library.impl("note", lambda x: (events.append("mark"), x.clone())[1], "CPU")
    torch.library.register_fake("horovod_tests::note", torch.empty_like, lib=library)
    try:
        for _ in range(3):
            events.clear()
            optimizer.zero_grad()
            step(rows).square().mean().backward()
            optimizer.step()
    finally:
        library._destroy()
    return [p.detach() for p in model.parameters()], list(events)


@pytest.mark.np(2)
def test_reductions_start_before_the_last_gradient_is_computed() -> None:
    found, events = trained(BACKEND)
    assert sorted(map(str, events)) == [*map(str, range(8)), "mark"]
    assert set(events[: events.index("mark")]) >= {4, 5, 6, 7}
    alone, _ = trained(None)  # one process with the rows of all
    torch.testing.assert_close(found, alone)


@pytest.mark.skipif(
    not os.environ.get("HOROVOD_TEST_INDUCTOR"), reason="compiles C++: HOROVOD_TEST_INDUCTOR=1"
)
@pytest.mark.timeout(300)
def test_inductor_keeps_the_order() -> None:
    hvd.init()  # here, as compiling may take longer than a call of a world may
    with (
        tempfile.TemporaryDirectory() as cache,
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(
            force_disable_caches=True, cpp_cache_precompile_headers=False, compile_threads=1
        ),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        _, events = trained("inductor")
    hvd.shutdown()
    assert sorted(map(str, events)) == [*map(str, range(8)), "mark"]
    assert set(events[: events.index("mark")]) >= {4, 5, 6, 7}
