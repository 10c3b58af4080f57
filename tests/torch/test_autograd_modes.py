"""DistributedOptimizer under the ways to run autograd: each ends where one process ends."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import horovod.torch as hvd
from reference import (
    close,
    data,
    loss_of,
    net,
    same_on_all,
    sgd,
    train,
    trains_as_one_process,
    wrap,
)

Loss = Callable[[Any, torch.Tensor], Any]


class Backward:
    """A loss whose backward() is the given function."""

    def __init__(self, backward: Callable[[], object]) -> None:
        self.backward = backward


def target(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (output - x[:, :2].sin()).square().mean()


def checkpointed(reentrant: bool) -> Loss:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = model
        x.requires_grad_()  # without it a reentrant first segment has no gradients
        hidden = checkpoint(lambda x: middle(first(x)), x, use_reentrant=reentrant)
        return target(checkpoint(last, hidden, use_reentrant=reentrant), x)

    return loss


def in_segments(reentrant: bool) -> Loss:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return target(checkpoint_sequential(model, 3, x, use_reentrant=reentrant), x)

    return loss


def shared(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two segments that use the same parameters."""
    first, middle, last = model

    def segment(x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = middle(first(x))
        return hidden

    hidden = checkpoint(segment, x, use_reentrant=False)
    hidden = checkpoint(segment, hidden[:, :4], use_reentrant=False)
    return target(last(hidden), x)


def of_each_rank(loss: Loss) -> Loss:
    """The mean over ranks of a loss that is no mean over samples."""
    return lambda model, x: torch.stack([loss(model, part) for part in x.split(6)]).mean()


def penalty_of_parameters(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([g.square().sum() for g in gradients]).sum()


def penalty_of_inputs(model: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return loss_of(model, x) + (gradient.norm(dim=1) - 1).square().mean()


def twice(model: Any, x: torch.Tensor) -> Backward:
    loss = loss_of(model, x)

    def backward() -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    return Backward(backward)


def functional(model: Any, x: torch.Tensor) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    return target(torch.func.functional_call(model, parameters, (x,)), x)


def with_anomaly_mode(model: Any, x: torch.Tensor) -> Backward:
    def backward() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of itself
            mode = torch.autograd.detect_anomaly()
        with mode:
            loss_of(model, x).backward()

    return Backward(backward)


def in_a_thread(model: Any, x: torch.Tensor) -> Backward:
    def backward() -> None:
        thread = threading.Thread(target=loss_of(model, x).backward)
        thread.start()
        thread.join()

    return Backward(backward)


def of_inputs_to(model: Any, x: torch.Tensor) -> Backward:
    """Gradients of chosen tensors, in two calls."""
    loss, (first, *others) = loss_of(model, x), list(model.parameters())

    def backward() -> None:
        loss.backward(inputs=others, retain_graph=True)
        loss.backward(inputs=[first])

    return Backward(backward)


class Scaled(torch.autograd.Function):
    """x * 3, whose gradient is not row-major, from a backward pass inside the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (x * 3).backward(gradients[0])
        assert x.grad is not None
        return x.grad.t().contiguous().t()


def custom_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, middle, last = model
    hidden = middle(nn.functional.linear(x, Scaled.apply(first.weight), first.bias))  # type: ignore[no-untyped-call]
    return target(last(hidden), x)


def sums(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Every gradient is one number, expanded; or a slice of another one."""
    parameters = [p.sum() for p in model.parameters()]
    flat = torch.cat([p.flatten() for p in model.parameters()])
    return x.mean() * (torch.stack(parameters).sum() + flat.square().sum())


def evaluating(context: Callable[[], Any]) -> Loss:
    """Evaluates between backward and step."""

    def loss(model: Any, x: torch.Tensor) -> Backward:
        def backward() -> None:
            loss_of(model, x).backward()
            model.eval()
            with context():
                loss_of(model, x)
            model.train()

        return Backward(backward)

    return loss


MODES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "checkpoint": (checkpointed(False), {}),
    "reentrant checkpoint": (checkpointed(True), {}),
    "sequential": (in_segments(False), {}),
    "reentrant sequential": (in_segments(True), {}),
    "shared by checkpoints": (shared, {}),
    "penalty of inputs": (penalty_of_inputs, {}),
    "penalty of parameters": (of_each_rank(penalty_of_parameters), {}),
    "retain_graph": (twice, {"backward_passes_per_step": 2}),
    "inputs=": (of_inputs_to, {}),
    "functional_call": (functional, {}),
    "anomaly mode": (with_anomaly_mode, {}),
    "thread": (in_a_thread, {}),
    "custom function": (custom_function, {}),
    "sums": (sums, {}),
    "no_grad": (evaluating(torch.no_grad), {}),
    "inference_mode": (evaluating(torch.inference_mode), {}),
}


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.np(2)
def test_training_equals_one_process(mode: str, groups: int | None) -> None:
    loss, options = MODES[mode]
    trains_as_one_process({"groups": groups, **options}, loss_of=loss)


@pytest.mark.parametrize(
    "mode",
    [
        "checkpoint",
        "reentrant checkpoint",
        "penalty of inputs",
        "penalty of parameters",
        "retain_graph",
        "custom function",
    ],
)
@pytest.mark.np(2)
def test_equal_weights_change_nothing(mode: str) -> None:
    loss, options = MODES[mode]
    model, alone = net(), net()
    optimizer = wrap(model, **options)
    optimizer.weight = 3.0
    train(optimizer, model, [hvd.rank()], loss_of=loss)
    mean = loss
    if options:  # means over passes too

        def mean(model: Any, x: torch.Tensor) -> Any:
            return loss_of(model, x)

    train(sgd(alone.parameters()), alone, range(hvd.size()), loss_of=mean)
    close(model, alone, net())


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.np(2)
def test_a_parameter_of_two_reentrant_segments(missing: bool) -> None:
    """Its gradient comes in two parts: added to a window that was whole, refused before it is."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]).double()
    alone = copy.deepcopy(model)
    start = copy.deepcopy(model)
    model[0].requires_grad_(missing)
    optimizer = wrap(model)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        first, shared, last = model
        hidden = first(x.requires_grad_())
        for _ in range(2):
            hidden = checkpoint(shared, hidden, use_reentrant=True)
        return target(last(hidden), x)

    if missing:
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1 times"):
            loss(model, data(hvd.rank())).backward()
        with pytest.raises(RuntimeError, match="was changed or replaced"):
            optimizer.synchronize()
        return
    alone[0].requires_grad_(False)
    train(optimizer, model, [hvd.rank()], loss_of=loss)
    train(sgd(alone.parameters()), alone, range(hvd.size()), loss_of=loss)
    close(model, alone, start)


def double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def hooked(kind: str, parameter: Any) -> None:
    if kind == "tensor":
        parameter.register_hook(lambda gradient: 2 * gradient)
    else:
        parameter.register_post_accumulate_grad_hook(double)


@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("kind", ["tensor", "post"])
@pytest.mark.np(2)
def test_hooks_of_the_user(kind: str, wrapped: str) -> None:
    """Only a hook that changes what has been submitted is refused."""
    model, alone = net(), net()
    optimizer = wrap(model) if wrapped == "before" else None
    for parameter in (*model.parameters(), *alone.parameters()):
        hooked(kind, parameter)
    optimizer = optimizer or wrap(model)
    if (kind, wrapped) == ("post", "before"):
        with pytest.raises(RuntimeError, match="was changed or replaced"):
            train(optimizer, model, [hvd.rank()])
        return
    train(optimizer, model, [hvd.rank()])
    train(sgd(alone.parameters()), alone, range(hvd.size()))
    close(model, alone, net())


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.zeros(5, 3).t(),
    "strided": lambda: torch.zeros(3, 10)[:, ::2],
    "view": lambda: torch.zeros(18)[3:].view(3, 5),
}
"""Zeros, as memory may hold them."""


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
@pytest.mark.np(2)
def test_gradients_set_by_hand_lie_anyhow(ranks: list[int]) -> None:
    for name, zeros in LAYOUTS.items():
        for accumulates in (False, True):
            parameter = nn.Parameter(torch.zeros(3, 5))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
            parameter.grad = zeros() if hvd.rank() in ranks else torch.zeros(3, 5)
            if accumulates:
                (parameter * (1.0 + hvd.rank())).sum().backward()
            elif hvd.rank() == 0:
                parameter.grad = parameter.grad + 3
            optimizer.step()
            assert parameter.tolist() == [[-1.5] * 5] * 3, name


@pytest.mark.parametrize("mine", [[True, True], [True, False]])
@pytest.mark.np(2)
def test_models_in_channels_last(mine: list[bool]) -> None:
    def conv() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(8, 2)
        ).double()

    def images(model: Any, x: torch.Tensor) -> torch.Tensor:
        batch = x[:, :3, None, None] * torch.linspace(0, 1, 16, dtype=x.dtype).view(1, 1, 4, 4)
        if next(model.parameters()).is_contiguous(memory_format=torch.channels_last):
            batch = batch.contiguous(memory_format=torch.channels_last)
        return target(model(batch), x)

    model, alone = conv(), conv()
    if mine[hvd.rank()]:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = wrap(model, groups=2)
    train(optimizer, model, [hvd.rank()], loss_of=images)
    train(sgd(alone.parameters()), alone, range(hvd.size()), loss_of=images)
    close(model, alone, conv())
    same_on_all(model)
