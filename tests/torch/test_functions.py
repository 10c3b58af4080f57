"""Parameters and optimizer state become the root's, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError


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
        lambda d: {"x": {k: d[k] for k in "ab"}, 3: [d["flag"], ("half", d["half"])]},
        lambda d: [("net", {k: d[k] for k in "ab"}), ("rest", [d["flag"], d["half"]])],
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


@pytest.mark.np(3)
def test_an_argument_that_is_wrong_on_one_rank_fails_on_all_and_says_where() -> None:
    def tensors() -> dict[str, Any]:
        return {f"{i}": torch.zeros(2) for i in range(5)}

    def generator() -> Any:
        yield "0", torch.zeros(2)
        raise LookupError("lost")

    own = ValueError, TypeError, LookupError
    for wrong, where, text in (
        ({**tensors(), "3": 7}, own, "'3' in params is a int"),
        (generator(), own, "lost"),
        ([*tensors().items(), ("2", torch.zeros(2))], own, "'2' is twice"),
        (tensors().values(), MismatchError, '"0" is float32 .2. on rank 0 but missing on ra'),
        (dict(list(tensors().items())[:4]), MismatchError, '"4" is .* but missing on rank 1'),
        ({**tensors(), "1": torch.zeros(3)}, MismatchError, '"1" is float32 .2. on .*3. on ra'),
        ({**tensors(), "1": torch.zeros(2).int()}, MismatchError, '"1" is .*int32 .2. on rank'),
        ({**tensors(), "2": torch.zeros(2, device="meta")}, own, 'broadcast "2".*meta'),
        ({**tensors(), "2": torch.zeros(2).to_sparse()}, own, 'broadcast "2".*sparse'),
        ({**tensors(), "2": torch.zeros(1).expand(2)}, own, 'broadcast "2".*expanded'),
    ):
        started = time.monotonic()
        with pytest.raises(where if hvd.rank() == 1 else hvd.HorovodInternalError, match=text):
            hvd.broadcast_parameters(wrong if hvd.rank() == 1 else tensors(), root_rank=0)
        assert time.monotonic() - started < 5
        mine = {"a": torch.tensor(hvd.rank())}
        hvd.broadcast_parameters(mine, root_rank=2)  # usable after, and no name stays behind
        assert mine["a"].item() == 2


@pytest.mark.np(3)
def test_parameters_and_state_in_a_process_set() -> None:
    pair = hvd.add_process_set([0, 2])
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    torch.nn.init.constant_(model.weight, hvd.rank())
    steps(optimizer, model, hvd.rank())
    if hvd.rank() != 1:
        hvd.broadcast_parameters(model.state_dict(), 2, process_set=pair)
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=pair)
        mine = [model.state_dict(), optimizer.state_dict()]
        first, second = hvd.allgather_object(mine, process_set=pair)
        same(first, second)
        assert optimizer.state[model.weight]["step"].item() == 2
    hvd.remove_process_set(pair)


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
                state["again"] = state["list"][0]
        self.state["global"] = {"count": self.state[self.param_groups[0]["params"][0]]["int"]}


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, weight_decay=0.1, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, weight_decay=0.1, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "radam": lambda ps: torch.optim.RAdam(ps, maximize=True),
    "asgd": lambda ps: torch.optim.ASGD(ps),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=3),
    "sparseadam": lambda ps: torch.optim.SparseAdam(ps),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]),
    "odd": Odd,
}


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    classes = {name.lower() for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert classes - OPTIMIZERS.keys() == {"optimizer"}


class Rows(torch.nn.Module):
    """An embedding with sparse gradients, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long().flatten() % 4)


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.layout) == (b.dtype, b.layout)
        assert torch.equal(a.to_dense(), b.to_dense()), (a, b)
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


@pytest.mark.np(1, 2, 3)
def test_broadcast_optimizer_state_changes_the_state_only() -> None:
    root = hvd.size() - 1
    for name, make in OPTIMIZERS.items():
        if name == "muon" and not hasattr(torch.optim, "Muon"):
            continue
        sparse = name == "sparseadam"
        for wrapped in (False,) if sparse or hvd.size() == 1 else (False, True):
            torch.manual_seed(0)
            model = Rows() if sparse else torch.nn.Linear(3, 2)
            optimizer = make(model.parameters())
            if hvd.rank() == root:
                steps(optimizer, model, 3)
            if wrapped:
                optimizer = hvd.DistributedOptimizer(optimizer)
            before = frozen(model)
            hvd.broadcast_optimizer_state(optimizer, root_rank=root)
            same(frozen(model), before)
            # The state is alive: a step works and gives the same everywhere.
            hvd.broadcast_parameters(model.state_dict(), root_rank=root)
            first = copy.deepcopy(optimizer.state_dict())
            if name == "odd":
                p = model.weight
                assert optimizer.state[p]["self"] is p
                assert optimizer.state[p]["scalar"].dtype is torch.int16
                assert optimizer.state[p]["list"][0] is optimizer.state[p]["again"]
            steps(optimizer, model, 1)
            mine = [first, optimizer.state_dict(), model.state_dict()]
            for theirs in hvd.allgather_object(mine):
                same(mine, theirs)


@pytest.mark.np(2)
def test_ranks_restored_and_fresh_end_with_the_same_weights() -> None:
    """Rank 0 continues from a checkpoint: exactly what one process does."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    alone, reference = build()
    steps(reference, alone, 3)
    checkpoint = copy.deepcopy([alone.state_dict(), reference.state_dict()])
    model, optimizer = build()
    if hvd.rank() == 0:
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    same([model.state_dict(), optimizer.state_dict()], checkpoint)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for one, other in ((alone, reference), (model, optimizer)):
        steps(other, one, 2)
    same(model.state_dict(), alone.state_dict())


@pytest.mark.np(2)
def test_state_keeps_its_layout_and_what_is_no_plain_tensor() -> None:
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if hvd.rank() == 0:
        model(torch.ones(1, 3, 4, 4)).sum().backward()
        optimizer.step()
        optimizer.state[model.bias]["sparse"] = torch.ones(3).to_sparse()
        optimizer.state[model.bias]["view"] = torch.ones(1).expand(3)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    moments = optimizer.state[model.weight]["exp_avg"]
    assert moments.stride() == model.weight.stride() != moments.contiguous().stride()
    assert optimizer.state[model.bias]["sparse"].to_dense().tolist() == [1.0] * 3
    assert optimizer.state[model.bias]["view"].tolist() == [1.0] * 3
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()


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
    kind = torch.optim.Adam if hvd.rank() else torch.optim.SGD
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 could not .*Adam .* has SGD"):
        hvd.broadcast_optimizer_state(kind(layers[0].parameters(), lr=0.1), root_rank=0)
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    optimizer.state[layers[0].weight]["bad"] = Unpicklable() if hvd.rank() == 0 else 1
    with pytest.raises(hvd.HorovodInternalError, match="rank 0 could not pickle"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.allgather_object(1) == [1, 1]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("never to be sent")
