"""DistributedOptimizer: what it is, what it refuses, and how it sits in torch's own machinery."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import horovod.torch as hvd
import reference
from reference import (
    close,
    data,
    joined,
    loss_of,
    net,
    same_on_all,
    sgd,
    train,
    trains_as_one_process,
    weights,
    wrap,
)

# ---------------------------------------------------------------------------------------------
# Construction


@pytest.mark.np(1, 2)
def test_the_class_is_the_wrapped_ones() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.note = "kept"
    wrapped = wrap(model, optimizer)
    assert isinstance(wrapped, torch.optim.SGD)
    assert type(wrapped).__name__ == "SGD"
    assert wrapped.__module__ == "horovod.torch.optimizer"
    assert wrapped.param_groups is optimizer.param_groups
    assert wrapped.note == "kept"
    assert wrapped.backward_passes_per_step == 1 and wrapped.op == hvd.Average
    assert wrapped.process_set is hvd.global_process_set
    assert wrapped._parameter_names == {p: name for name, p in model.named_parameters()}
    assert wrapped._handles == {}
    if hvd.size() > 1:
        assert wrapped._requires_update == set(model.parameters())
        assert set(wrapped._allreduce_delay.values()) == {1}


class Custom(torch.optim.Optimizer):
    """Somebody's own, with arguments that no group holds."""

    def __init__(self, parameters: Any, power: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.power = power

    @torch.no_grad()
    def step(self, closure: Any = None) -> str:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad**self.power)
        return "stepped"


@pytest.mark.np(1, 2)
def test_any_optimizer_can_be_wrapped() -> None:
    optimizer = trains_as_one_process(make=lambda parameters: Custom(parameters, power=3))
    assert isinstance(optimizer, Custom) and optimizer.power == 3
    assert optimizer.step() == "stepped"


@pytest.mark.parametrize("name", ["weight", "op", "reducer", "synchronize"])
@pytest.mark.np(1)
def test_an_attribute_that_would_mean_two_things_is_an_error(name: str) -> None:
    optimizer = Custom(net().parameters(), power=3)
    setattr(optimizer, name, 0.5)
    with pytest.raises(ValueError, match=f"Custom has .*: {name}"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.np(1, 2)
def test_arguments_are_checked() -> None:
    """In the order of the rows: of two faults the first is reported."""
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    weight, bias = named[0][1], named[1][1]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        ("at least 1", {"backward_passes_per_step": 0}),
        ("at least 1", {"backward_passes_per_step": -1}),
        ("named_parameters", {"named_parameters": [p for _, p in named]}),
        ("of the name 0.weight", {"named_parameters": [*named, named[0]]}),
        ("of the name 0.weight", {"named_parameters": [(named[0][0], p) for _, p in named]}),
        ("lacks 1", {"named_parameters": named[1:]}),
        ("groups", {"groups": 0}),
        ("groups", {"groups": -1}),
        ("groups", {"groups": [[weight, "bias"]]}),
        ("groups", {"groups": [[weight], [bias, weight]]}),
        ("groups", {"groups": [[weight, weight]]}),
    ]
    for text, options in wrong:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(plain, **options)
    keys: set[str] = set()
    for text, options in wrong[::-1]:
        if not keys & options.keys():
            later = dict(wrong[-1][1]) if "groups" not in options else {}
            with pytest.raises(ValueError, match=text):
                hvd.DistributedOptimizer(plain, **{**later, **options})
        keys |= options.keys()
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain))


@pytest.mark.np(1, 2)
def test_num_groups_is_deprecated_and_gives_way_to_groups() -> None:
    model = net()
    with pytest.warns(DeprecationWarning, match="num_groups") as caught:
        optimizer = wrap(model, num_groups=2)
    assert [warning.filename for warning in caught] == [reference.__file__]  # the caller
    train(optimizer, model, [hvd.rank()])
    same_on_all(model)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="groups"):
        wrap(model, num_groups=2, groups=0)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="groups"):
        wrap(model, num_groups=-1)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="at least 1"):
        wrap(model, num_groups=2, backward_passes_per_step=0)


@pytest.mark.np(1, 2)
def test_names_may_come_from_a_generator_and_cover_more_than_the_optimizer() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    named = ((name, p) for name, p in model.named_parameters())
    wrapped = hvd.DistributedOptimizer(optimizer, named)
    for p in model[0].parameters():
        assert wrapped._parameter_names[p].startswith("0.")
    train(wrapped, model, [hvd.rank()])
    same_on_all(model)


@pytest.mark.np(1)
def test_new_arguments_are_keywords() -> None:
    parameters = inspect.signature(hvd.DistributedOptimizer).parameters
    old = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert old == [
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
        "num_groups",
        "groups",
        "sparse_as_dense",
        "process_set",
    ]


# ---------------------------------------------------------------------------------------------
# Hooks of autograd


@pytest.mark.np(2)
def test_reductions_start_while_backward_runs() -> None:
    started: list[int] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            started.append(len(optimizer._handles))
            return grad

    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    x = torch.ones(2, 4)

    def backward() -> None:
        y = x
        for layer in layers:
            y = layer(Watch.apply(y) if y.requires_grad else y)
        y.sum().backward()

    for options, wanted in (({}, [2, 4]), ({"groups": 2}, [0, 3]), ({"groups": 1}, [0, 0])):
        optimizer = wrap(layers, **options)
        for _ in range(2):
            started.clear()
            backward()
            assert started == wanted
            assert optimizer._handles == {}  # the end of backward has waited
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.np(2)
def test_zero_grad_while_gradients_are_reduced_is_an_error() -> None:
    model = nn.ModuleList([net(0), net(1)])
    optimizer = wrap(model)
    loss_of(model[0], data(hvd.rank())).backward()  # the window isn't full
    assert len(optimizer._handles) == 4
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    loss_of(model[1], data(hvd.rank())).backward()
    optimizer.zero_grad()  # now it is, and nothing is in flight
    assert all(p.grad is None for p in model.parameters())
    loss_of(model[0], data(hvd.rank())).backward()
    optimizer.step()
    same_on_all(model)


@pytest.mark.np(1, 2)
def test_zero_grad_takes_the_arguments_of_the_wrapped_one() -> None:
    model = net()
    optimizer = wrap(model)
    for arguments, to_none in (
        ({}, True),
        ({"set_to_none": True}, True),
        ({"set_to_none": False}, False),
    ):
        loss_of(model, data(hvd.rank())).backward()
        optimizer.step()
        optimizer.zero_grad(**arguments)
        for p in model.parameters():
            assert (p.grad is None) is to_none
            assert p.grad is None or not p.grad.any()
    optimizer.zero_grad(False)
    train(optimizer, model, [hvd.rank()])
    same_on_all(model)


# ---------------------------------------------------------------------------------------------
# Reductions


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 2.0, "groups": 2},
        {"op": hvd.Sum},
        {"op": hvd.Sum, "groups": 2},
        {"op": hvd.Min},
        {"op": hvd.Max},
        {"op": hvd.Product},
    ],
    ids=lambda options: "-".join(f"{value}" for value in options.values()),
)
@pytest.mark.np(2, 3)
def test_gradients_are_reduced_as_told(options: dict[str, Any]) -> None:
    model = net(dtype=torch.float32)
    optimizer = wrap(model, **options)
    by_rank = []
    for rank in range(hvd.size()):
        each = copy.deepcopy(model)
        loss_of(each, data(rank)).backward()
        by_rank.append([p.grad for p in each.parameters()])
    loss_of(model, data(hvd.rank())).backward()
    optimizer.synchronize()
    reduce: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
        hvd.Average: lambda grads: grads.mean(0),
        hvd.Sum: lambda grads: grads.sum(0),
        hvd.Min: lambda grads: grads.amin(0),
        hvd.Max: lambda grads: grads.amax(0),
        hvd.Product: lambda grads: grads.prod(0),
    }
    rough = 0.02 if "compression" in options else 1e-6
    for p, *grads in zip(model.parameters(), *by_rank, strict=True):
        wanted = reduce[optimizer.op](torch.stack(grads))
        assert float((p.grad - wanted).norm()) <= rough * float(wanted.norm())
    with optimizer.skip_synchronize():
        optimizer.step()
    same_on_all(model)


class Halving:
    """A user's compressor: an object with the two methods."""

    def __init__(self) -> None:
        self.calls = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.calls += 1
        return tensor / 2, None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 2


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2)
def test_a_compressor_of_the_users_own(groups: int | None) -> None:
    halving = Halving()
    trains_as_one_process({"compression": halving, "groups": groups}, windows=[1, 1])
    assert halving.calls == 8
    assert hvd.allreduce(torch.ones(2), compression=halving, op=hvd.Sum).tolist() == [2.0, 2.0]


@pytest.mark.np(2)
def test_a_compressor_may_be_bound_to_each_name() -> None:
    """As one that keeps what its rounding lost."""
    bound: list[str] = []

    class Bound(Halving):
        def bind(self, name: str) -> Halving:
            bound.append(name)
            return Halving()

    whole = Bound()
    trains_as_one_process({"compression": whole})
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, full in zip(names, bound, strict=True):
        assert full.endswith(name)
    assert whole.calls == 0


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.np(2)
def test_a_compressor_that_fails_on_one_rank_fails_the_gradient_on_all(groups: int | None) -> None:
    class Broken(Halving):
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if hvd.rank() == 1:
                raise RuntimeError("broken")
            return super().compress(tensor)

    model = nn.Linear(2, 1, bias=False)
    optimizer = wrap(model, compression=Broken(), groups=groups)
    with pytest.raises(
        hvd.HorovodInternalError if hvd.rank() == 0 else RuntimeError, match="broken"
    ):
        model(torch.ones(2)).sum().backward()
        optimizer.synchronize()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


@pytest.mark.np(3)
def test_outside_its_process_set_it_is_a_plain_optimizer() -> None:
    pair = hvd.add_process_set([0, 2])
    ranks = [0, 2] if pair.included() else [1]
    for options in ({}, {"groups": 2}, {"backward_passes_per_step": 2}, {"op": hvd.Average}):
        passes = options.get("backward_passes_per_step", 1)
        windows = [passes] * 3
        model, alone = net(), net()
        optimizer = wrap(model, process_set=pair, **options)
        train(optimizer, model, [hvd.rank()], windows)
        train(sgd(alone.parameters()), alone, ranks, windows)
        close(model, alone, net())
    optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    if not pair.included():
        for _ in range(3):  # as often as it likes
            loss_of(model, data(1)).backward()
        optimizer.zero_grad()
    hvd.remove_process_set(pair)


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}, {"op": hvd.Adasum}],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.np(1)
def test_alone_it_is_the_wrapped_optimizer_bit_for_bit(options: dict[str, Any]) -> None:
    model, plain = net(), net()
    for _ in range(2):
        train(wrap(model, **options), model, [0], windows=[1, 2])
        train(sgd(plain.parameters()), plain, [0], windows=[1, 2])
    assert torch.equal(weights(model), weights(plain))


# ---------------------------------------------------------------------------------------------
# What torch attaches to optimizers


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.np(2)
def test_step_hooks_run_once_on_reduced_gradients(with_closure: bool) -> None:
    """Those of the wrapped optimizer, of the result, and of all optimizers."""
    model, alone = net(), net()
    inner = sgd(model.parameters())
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    inner.register_step_pre_hook(note("early"))
    optimizer = wrap(model, inner)

    def look(*_: Any) -> None:
        calls.append("pre")
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-15)

    optimizer.register_step_pre_hook(note("pre") if with_closure else look)
    optimizer.register_step_post_hook(note("post"))
    removers = [
        register_optimizer_step_pre_hook(note("all pre")),
        register_optimizer_step_post_hook(note("all post")),
    ]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, data(hvd.rank()))
        loss.backward()
        return loss

    for _ in range(2):
        loss_of(alone, joined(range(2))).backward()
        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        assert calls == ["all pre", "early", "pre", "post", "all post"]
        calls.clear()
        with torch.no_grad():
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.copy_(p)
        alone.zero_grad()
    for remover in removers:
        remover.remove()
    same_on_all(model)


@pytest.mark.np(2)
def test_a_step_is_one_range_in_the_profile() -> None:
    model = net()
    optimizer = wrap(model)
    loss_of(model, data(hvd.rank())).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = [event.name for event in profile.events() if event.name.startswith("Optimizer.")]
    assert sorted(names) == ["Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
    "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
    "OneCycleLR": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=9),
    "ReduceLROnPlateau": lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.np(2)
def test_schedules_steer_it_whichever_they_were_made_for(schedule: str, when: str) -> None:
    """And say nothing of a wrong order of calls."""
    model, alone = net(), net()
    inner, plain = sgd(model.parameters()), sgd(alone.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = SCHEDULES[schedule](inner) if when == "before" else None
        optimizer = wrap(model, inner)
        made = made or SCHEDULES[schedule](optimizer)
        wanted = SCHEDULES[schedule](plain)
        for step in range(4):
            train(optimizer, model, [hvd.rank()], windows=[1])
            train(plain, alone, range(2), windows=[1])
            for each in (made, wanted):
                each.step(*([1.0] if schedule == "ReduceLROnPlateau" else []))
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.np(2)
def test_it_prints_as_the_wrapped_one() -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert repr(wrap(model, plain)) == repr(plain)
