"""Gradients that leave inside backward are the same gradients; those that are not whole don't."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd


class Net(nn.Module):
    """`raw` uses a parameter outside of its module, `twice` calls a module again."""

    def __init__(self, tied: bool = False, raw: bool = False, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.raw, self.twice = raw, twice
        self.double()
        if tied:
            self.last.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        x = self.second(torch.tanh(self.norm(self.first(x))))
        x = self.second(x) if self.twice else x
        x = self.last(x) * self.scale
        return F.linear(x, weight) if self.raw else x


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + hvd.rank())
    return torch.randn(5, 4, dtype=torch.float64, generator=generator)


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), **options)


def early(optimizer: Any) -> list[str]:
    """Notes the names of the parameters whose reductions start inside backward, from here on."""
    reducer, names = optimizer.reducer, []
    start = reducer.start_early

    def noted(index: int, gradient: torch.Tensor) -> None:
        start(index, gradient)
        if reducer.parameters[index] in reducer.in_flight():
            names.append(reducer.names[reducer.parameters[index]])

    reducer.start_early = noted
    return names


def train(overlapped: bool, uses: str, case: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The model after a few steps, and what left early."""
    options = {
        "passes": {"backward_passes_per_step": 2},
        "groups": {"num_groups": 2},
        "skip": {"skip_unused_parameters": True},
        "fp16": {"compression": hvd.Compression.fp16},
    }.get(case, {})
    model = Net(**{use: True for use in uses.split() if use != "penalty"})
    optimizer = optimizer_of(model, **options)
    names = early(optimizer)
    wrapped = hvd.overlap(model, optimizer) if overlapped else model
    for step in range(3):
        optimizer.zero_grad(set_to_none=case != "zeros")
        if case == "weight":
            optimizer.weight = 1.0 + hvd.rank() + step
        if case == "no_sync":
            with optimizer.no_sync():
                wrapped(batch(step)).square().mean().backward()
        for i in range(2 if case == "passes" else 1):
            loss = wrapped(batch(3 + step + i)).square().mean()
            if "penalty" in uses:
                loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
        optimizer.step()
    return model.state_dict(), names


CASES = ["plain", "passes", "groups", "skip", "fp16", "weight", "zeros", "no_sync"]
PARTIAL = ["tied", "raw", "twice", "penalty", "tied raw twice penalty"]


@pytest.mark.np(2)
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_with_and_without(case: str) -> None:
    wanted, none = train(False, "", case)
    found, names = train(True, "", case)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert none == []
    # The one that completes a group stands for all of it.
    assert ("scale" if case == "groups" else "first.weight") in names


@pytest.mark.np(2)
@pytest.mark.parametrize("uses", PARTIAL)
def test_gradients_that_are_not_whole_leave_at_the_end(uses: str) -> None:
    wanted, _ = train(False, uses, "plain")
    found, names = train(True, uses, "plain")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    partial = {"second.weight"} if uses == "twice" else {"first.weight"}
    assert not names if "penalty" in uses else partial.isdisjoint(names)


@pytest.mark.np(2)
def test_a_change_of_use_raises_and_the_next_window_is_right() -> None:
    model = Net()
    optimizer = optimizer_of(model)
    wrapped = hvd.overlap(model, optimizer)

    def step(i: int) -> None:
        optimizer.zero_grad()
        wrapped(batch(i)).square().mean().backward()
        optimizer.step()

    step(0)
    step(1)
    model.raw = True
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"first\.weight left early.*without hvd\.overlap"):
        wrapped(batch(2)).square().mean().backward()
    with pytest.raises(RuntimeError):
        optimizer.step()
    step(3)
    weight = model.first.weight.detach()
    assert torch.equal(hvd.allreduce(weight, op=hvd.Max), hvd.allreduce(weight, op=hvd.Min))


@pytest.mark.np(2)
def test_a_hook_that_changes_what_left_early_raises() -> None:
    model = Net()
    optimizer = optimizer_of(model)
    wrapped = hvd.overlap(model, optimizer)
    wrapped(batch(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.last.weight.register_hook(torch.zeros_like)
    names = early(optimizer)
    with pytest.raises(RuntimeError, match=r"last\.weight left early"):
        wrapped(batch(1)).square().mean().backward()
    assert "last.weight" in names


@pytest.mark.np(2)
def test_gradients_that_are_not_accumulated_leave_nothing_behind() -> None:
    model = Net()
    optimizer = optimizer_of(model)
    wrapped = hvd.overlap(model, optimizer)
    for i in range(2):
        optimizer.zero_grad()
        wrapped(batch(i)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    x = batch(2).requires_grad_()
    for inputs in ([x], [model.first.weight, x], [model.scale]):
        torch.autograd.grad(wrapped(x).sum(), inputs)
        assert not optimizer.reducer.busy()
    wrapped(x).sum().backward(inputs=[x])
    assert not optimizer.reducer.busy()
    with torch.no_grad():
        wrapped.eval()(x)
    assert not model.training


@pytest.mark.np(1)
def test_the_wrapper_is_the_model_to_the_outside() -> None:
    model = Net(tied=True)
    optimizer = optimizer_of(model)
    names = list(model.state_dict())
    wrapped = hvd.overlap(model, optimizer)
    x = batch(0)
    outer = nn.Sequential(wrapped)
    assert list(model.state_dict()) == list(wrapped.state_dict()) == names
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert wrapped.first is model.first
    assert wrapped.twice is False
    wrapped.load_state_dict(model.state_dict())
    state = {name: value + 1 for name, value in outer.state_dict().items()}
    outer.load_state_dict(state)
    assert torch.equal(model.scale, state["0.scale"])
    wrapped(x).sum().backward()
    expected = model.scale.grad.clone()
    # The model by itself, and copies of it, work as before and have nothing of the wrapper.
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        other(x).sum().backward()
        assert torch.equal(other.scale.grad, expected)
        assert isinstance(other.scale, nn.Parameter)
    del wrapped, outer
    gc.collect()
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(TypeError, match="needs a DistributedOptimizer"):
        hvd.overlap(model, torch.optim.SGD(model.parameters(), lr=0.1))
