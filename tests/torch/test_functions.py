"""Parameters and optimizer state become the root's, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import horovod.torch as hvd


@pytest.mark.np(2)
def test_broadcast_parameters_in_every_form() -> None:
    def fresh() -> dict[str, torch.Tensor]:
        return {
            "b": torch.full((3, 2), float(hvd.rank())).t(),
            "a": torch.tensor(hvd.rank()),
            "flag": torch.tensor([hvd.rank() == 1]),
            "half": torch.full((2,), float(hvd.rank()), dtype=torch.bfloat16),
            "none": torch.ones(0),
        }

    def check(tensors: dict[str, torch.Tensor]) -> None:
        assert torch.equal(tensors["b"], torch.ones(2, 3))
        assert tensors["a"].item() == 1
        assert tensors["flag"].item() is True
        assert torch.equal(tensors["half"], torch.ones(2, dtype=torch.bfloat16))

    for form in (
        lambda d: d,
        lambda d: list(d.items()),
        lambda d: iter(reversed(d.items())) if hvd.rank() else iter(d.items()),
        lambda d: list(d.values()),
    ):
        tensors = fresh()
        hvd.broadcast_parameters(form(tensors), root_rank=1)
        check(tensors)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for state in hvd.allgather_object(model.state_dict()):
        assert all(
            torch.equal(a, b)
            for a, b in zip(state.values(), model.state_dict().values(), strict=True)
        )


@pytest.mark.np(2)
def test_broadcast_parameters_refuses_other_things() -> None:
    for wrong in (3, "abc", torch.ones(2), [1, 2], [("a", 1)], {"a": None}, [("a", "b", "c")]):
        with pytest.raises(ValueError, match="params"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    for value in hvd.allgather_object(hvd.rank()):
        assert value in (0, 1)
    # One tensor that can't be sent from one rank: every rank is told, and no name stays behind.
    tensors = {f"{i}": torch.zeros(2) for i in range(5)}
    if hvd.rank() == 1:
        tensors["2"] = torch.zeros(2, device="meta")
    with pytest.raises((ValueError, hvd.HorovodInternalError), match='broadcast "2"'):
        hvd.broadcast_parameters(tensors, root_rank=0)
    hvd.broadcast_parameters({f"{i}": torch.zeros(2) for i in range(5)}, root_rank=0)


class Odd(torch.optim.Optimizer):
    """Keeps all sorts of things as state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["tensor"] = state.get("tensor", torch.zeros_like(p)) + 1
                state["scalar"] = state.get("scalar", torch.tensor(0, dtype=torch.int16)) + 1
                state["int"] = state.get("int", 0) + 1
                state["none"] = None
                state["list"] = [torch.full((2,), float(state["int"])), 3]
                state["nested"] = {"deep": ({"x": torch.ones(1).bool()}, 1.5)}
                state["double"] = torch.ones(2, dtype=torch.float64)
                state["self"] = p
        self.state["global"] = {"count": self.state[self.param_groups[0]["params"][0]]["int"]}


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=3),
    "odd": Odd,
}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), (a, b)
    elif isinstance(a, dict):
        assert set(a) == set(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b, (a, b)


def steps(optimizer: torch.optim.Optimizer, model: torch.nn.Module, count: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(count):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def frozen(model: torch.nn.Module) -> list[Any]:
    return [
        copy.deepcopy(model.state_dict()),
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        torch.get_rng_state(),
    ]


@pytest.mark.np(1, 2)
def test_broadcast_optimizer_state_changes_the_state_only() -> None:
    root = hvd.size() - 1
    for name, make in OPTIMIZERS.items():
        for wrapped in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)
            optimizer = make(model.parameters())
            if hvd.rank() == root:
                steps(optimizer, model, 3)
            if wrapped:
                optimizer = hvd.DistributedOptimizer(optimizer)
            before = frozen(model)
            hvd.broadcast_optimizer_state(optimizer, root_rank=root)
            same(frozen(model), before)
            for state in hvd.allgather_object(optimizer.state_dict()):
                same(optimizer.state_dict(), state)
            if name == "odd":
                p = model.weight
                assert optimizer.state[p]["self"] is p
                assert optimizer.state[p]["scalar"].dtype is torch.int16
            # The state is alive: a step works and gives the same everywhere.
            hvd.broadcast_parameters(model.state_dict(), root_rank=root)
            steps(optimizer, model, 1)
            for state in hvd.allgather_object(model.state_dict()):
                same(model.state_dict(), state)


@pytest.mark.np(3)
def test_options_of_every_group_are_the_roots() -> None:
    r = hvd.rank()
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(
        [
            {"params": a.parameters(), "lr": 0.1 + r, "betas": (0.5 + r / 10, 0.9)},
            {
                "params": b.parameters(),
                "lr": torch.tensor(0.2 + r),
                "mode": f"m{r}",
                "fast": r == 2,
            },
        ],
        foreach=False,
    )
    if r == 0:
        optimizer.param_groups[0]["only here"] = 1
    if r == 2:
        optimizer.param_groups[0]["only there"] = [1, (2, "x")]
    rate = optimizer.param_groups[1]["lr"]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    groups = optimizer.param_groups
    hvd.broadcast_optimizer_state(optimizer, root_rank=2)
    assert optimizer.param_groups is groups
    assert groups[0]["betas"] == (0.7, 0.9)
    assert groups[0]["lr"] == 2.1 and type(groups[0]["lr"]) is float
    assert groups[1]["lr"] is rate and rate.item() == pytest.approx(2.2)
    assert groups[1]["mode"] == "m2" and groups[1]["fast"] is True
    assert groups[0]["only there"] == [1, (2, "x")] and "only here" not in groups[0]
    optimizer.step()
    schedule.step()
    for state in hvd.allgather_object(optimizer.state_dict()):
        same(optimizer.state_dict(), state)


@pytest.mark.np(2)
def test_optimizers_that_differ_are_told_apart() -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(1 + hvd.rank())]
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in layers], lr=0.1)
    with pytest.raises(hvd.HorovodInternalError, match="parameter groups"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    optimizer.state[layers[0].weight]["bad"] = Unpicklable() if hvd.rank() == 0 else 1
    with pytest.raises(hvd.HorovodInternalError, match="rank 0 could not pickle"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.allgather_object(1) == [1, 1]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("never to be sent")
