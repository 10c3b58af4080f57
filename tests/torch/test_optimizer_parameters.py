"""DistributedOptimizer: which parameters there are, who uses them, and how their gradients look."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
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
# Parameters that not all ranks use


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = (nn.Linear(4, 2).double() for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return [self.a, self.b][branch](x)


def loss_of_branches(model: Branches, step: int, ranks: list[int]) -> torch.Tensor:
    """Rank 0 begins with branch a and rank 1 with b, they change over; the third rank has both."""
    losses = []
    for rank in ranks:
        x = data(rank, step)
        used = [0, 1] if rank == 2 else [(rank + step // 2) % 2]
        losses.append(sum(model(x, branch).square().sum() for branch in used))
    return sum(losses) / len(ranks)


def across_branches(model: Branches) -> list[list[torch.Tensor]]:
    return [[model.a.weight, model.b.weight, model.unused.bias], [model.a.bias, model.b.bias]]


@pytest.mark.parametrize("skip", [False, True], ids=["zeros", "skip"])
@pytest.mark.parametrize("grouping", ["single", "two groups", "lists"])
@pytest.mark.np(2, 3)
def test_parameters_that_only_some_ranks_use_count_as_zero(grouping: str, skip: bool) -> None:
    model, alone = Branches(), Branches()
    groups = {"single": None, "two groups": 2, "lists": across_branches(model)}[grouping]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    optimizer = wrap(model, make(model), groups=groups, skip_unused_parameters=skip)
    plain = make(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss_of_branches(model, step, [hvd.rank()]).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of_branches(alone, step, list(range(hvd.size()))).backward()
        for p in alone.parameters():
            if p.grad is None and not skip:
                p.grad = torch.zeros_like(p)  # weight decay acts on parameters that nobody uses
        plain.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None)
    close(model, alone, Branches())
    assert torch.equal(model.unused.weight, Branches().unused.weight) is skip
    same_on_all(model)


@pytest.mark.np(2)
def test_a_parameter_that_no_rank_uses_in_a_step_is_left_alone_on_demand() -> None:
    model, alone = Branches(), Branches()
    optimizer = wrap(model, torch.optim.AdamW(model.parameters()), skip_unused_parameters=True)
    plain = torch.optim.AdamW(alone.parameters())
    for step, branch in enumerate([0, 0, 1, 0]):
        optimizer.zero_grad()
        model(data(hvd.rank(), step), branch).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        alone(joined(range(2), step), branch).square().mean().backward()
        plain.step()
    close(model, alone, Branches())
    same_on_all(model)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2)
def test_parameters_can_be_frozen_and_thawed(groups: int | None) -> None:
    """Before or after wrapping, in turns; a frozen one has no gradient, as in plain torch."""
    model, alone = Branches(), Branches()
    for each in (model, alone):
        each.b.requires_grad_(False)
        each.unused.requires_grad_(False)
    optimizer, plain = wrap(model, groups=groups), sgd(alone.parameters())
    for step in range(6):
        branch = step % 2
        for each in (model, alone):
            each.a.requires_grad_(branch == 0)
            each.b.requires_grad_(branch == 1)
        optimizer.zero_grad()
        model(data(hvd.rank(), step), branch).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        alone(joined(range(2), step), branch).square().mean().backward()
        plain.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None)
    close(model, alone, Branches())
    same_on_all(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())[:, :2]


@pytest.mark.parametrize("all_names", [False, True])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2)
def test_tied_weights(all_names: bool, groups: int | None) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        named = model.named_parameters(remove_duplicate=not all_names)
        return {"named_parameters": named, "groups": groups}

    optimizer = trains_as_one_process(options, model=Tied())
    assert len(optimizer._parameter_names) == 3


# ---------------------------------------------------------------------------------------------
# Groups of parameters, and several optimizers


def loss_of_both(models: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_of(models[0], x) + loss_of(models[1], x)


@pytest.mark.np(2)
def test_names_without_names_are_unique_over_groups() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.3}])

    model = nn.ModuleList([net(0), net(1)])
    optimizer = trains_as_one_process(
        {"named_parameters": None}, make=make, model=model, loss_of=loss_of_both
    )
    assert sorted(optimizer._parameter_names.values()) == [
        f"allreduce.noname.{g}.{p}" for g in range(2) for p in range(4)
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.3]


@pytest.mark.parametrize("when", ["fresh", "later", "in flight"])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"named_parameters": None}])
@pytest.mark.np(2)
def test_a_group_added_later_is_reduced(options: dict[str, Any], when: str) -> None:
    models, alone = (nn.ModuleList([net(0), net(1)]) for _ in range(2))
    options = {"named_parameters": models[0].named_parameters(), **options}
    optimizer = wrap(models, sgd(models[0].parameters()), **options)
    plain = sgd(alone[0].parameters())
    if when != "fresh":
        train(optimizer, models[0], [hvd.rank()])
        train(plain, alone[0], range(2))
        optimizer.zero_grad()
        plain.zero_grad()
    if when == "in flight":
        models[0][0](data(hvd.rank())).square().mean().backward()  # half of the first model
        alone[0][0](joined(range(2))).square().mean().backward()
    optimizer.add_param_group({"params": models[1].parameters(), "lr": 0.2})
    plain.add_param_group({"params": alone[1].parameters(), "lr": 0.2})
    if when == "in flight":
        for p in alone.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        plain.step()
    train(optimizer, models, [hvd.rank()], loss_of=loss_of_both)
    train(plain, alone, range(2), loss_of=loss_of_both)
    close(models, alone, nn.ModuleList([net(0), net(1)]))
    same_on_all(models)


class Pair:
    """A generator and a discriminator with equal parameter names, each with its optimizer."""

    def __init__(self, wrapped: bool, **options: Any) -> None:
        self.g, self.d = net(0), net(1)
        self.optimizers = []
        for model in (self.g, self.d):
            plain = sgd(model.parameters())
            self.optimizers.append(wrap(model, plain, **options) if wrapped else plain)

    def fake(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.g(x)] * 2, 1)


def one_backward(pair: Pair, x: torch.Tensor) -> None:
    g, d = pair.optimizers
    (loss_of(pair.d, pair.fake(x)) + loss_of(pair.g, x)).backward()
    d.step()
    g.step()
    d.zero_grad()
    g.zero_grad()


def separate_losses(pair: Pair, x: torch.Tensor) -> None:
    """The loss of d doesn't reach g, nor that of g d."""
    g, d = pair.optimizers
    d.zero_grad()
    g.zero_grad()
    fake = pair.fake(x)
    d_loss, g_loss = loss_of(pair.d, fake.detach()), fake.square().mean()
    d_loss.backward(retain_graph=True)
    g_loss.backward()
    d.step()
    g.step()


def through_the_discriminator(pair: Pair, x: torch.Tensor) -> None:
    """The usual loop: the loss of g leaves gradients in d, which are thrown away."""
    g, d = pair.optimizers
    d.zero_grad()
    fake = pair.fake(x)
    (pair.d(fake.detach()).square().mean() + (pair.d(x) - 1).square().mean()).backward()
    d.step()
    g.zero_grad()
    (pair.d(fake) - 1).square().mean().backward()
    g.step()


def both_losses_reach_both(pair: Pair, x: torch.Tensor) -> None:
    g, d = pair.optimizers
    d.zero_grad()
    g.zero_grad()
    scores = pair.d(pair.fake(x))
    scores.square().mean().backward(retain_graph=True)
    (scores - 1).square().mean().backward()
    d.step()
    g.step()


LOOPS: dict[str, tuple[Callable[[Pair, torch.Tensor], None], int]] = {
    "one backward": (one_backward, 1),
    "separate losses": (separate_losses, 1),
    "through the discriminator": (through_the_discriminator, 1),
    "both losses reach both": (both_losses_reach_both, 2),
}


@pytest.mark.parametrize("options", [{}, {"named_parameters": None}, {"groups": 2}])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.np(2)
def test_two_models_with_equal_names(name: str, options: dict[str, Any]) -> None:
    loop, passes = LOOPS[name]
    pair = Pair(True, backward_passes_per_step=passes, **options)
    alone = Pair(False)
    for step in range(3):
        loop(pair, data(hvd.rank(), step))
        loop(alone, joined(range(2), step))
    close(pair.g, alone.g, net(0))
    close(pair.d, alone.d, net(1))
    same_on_all(pair.g)
    same_on_all(pair.d)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.np(2)
def test_two_models_with_some_equal_names(named: bool) -> None:
    """As an encoder and a decoder of different depth, whose gradients are in flight together."""
    models, alone = [nn.ModuleList([net(0), net(1)[:1]]) for _ in range(2)]  # type: ignore[index]
    optimizers = [wrap(part, **({} if named else {"named_parameters": None})) for part in models]
    plain = sgd(alone.parameters())
    for step in range(3):
        for each, x in ((models, data(hvd.rank(), step)), (alone, joined(range(2), step))):
            each.zero_grad()
            (each[0](x) * each[1](x)[:, :2]).square().mean().backward()
        for optimizer in [*optimizers, plain]:
            optimizer.step()
    close(models, alone, nn.ModuleList([net(0), net(1)[:1]]))  # type: ignore[index]
    same_on_all(models)


@pytest.mark.np(2)
def test_two_optimizers_can_both_add_groups() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [(name, p)])
        for name, p in zip("ab", parameters[:2], strict=True)
    ]
    for optimizer, parameter in zip(optimizers, parameters[2:], strict=True):
        optimizer.add_param_group({"params": [parameter]})
    sum((p * (1 + hvd.rank())).sum() for p in parameters).backward()  # type: ignore[union-attr]
    for optimizer in optimizers:
        optimizer.step()
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full((2,), 1.5))


@pytest.mark.np(2)
def test_optimizers_work_in_threads_of_their_own() -> None:
    models, alone = nn.ModuleDict({"a": net(0), "b": net(1)}), [net(0), net(1)]
    optimizers = [
        wrap(part, named_parameters=[(f"{name}.{n}", p) for n, p in part.named_parameters()])
        for name, part in models.items()
    ]
    errors: list[BaseException] = []

    def run(optimizer: Any, model: nn.Module) -> None:
        try:
            train(optimizer, model, [hvd.rank()], windows=[1] * 10)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=pair)
        for pair in zip(optimizers, models.values(), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for seed, (model, one) in enumerate(zip(models.values(), alone, strict=True)):
        train(sgd(one.parameters()), one, range(2), windows=[1] * 10)
        close(model, one, net(seed))


@pytest.mark.np(2)
def test_a_second_wrapper_takes_the_parameters_over() -> None:
    model = net()
    first = wrap(model)
    with first.no_sync():
        loss_of(model, data(hvd.rank())).backward()
    second = wrap(model)
    with pytest.raises(RuntimeError, match="another DistributedOptimizer"):
        first.step()
    second.zero_grad()
    train(second, model, [hvd.rank()])
    assert not first._handles
    same_on_all(model)


# ---------------------------------------------------------------------------------------------
# Gradients of several layouts


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, 8, sparse=sparse).double()
        self.out = nn.Linear(8, 2).double()

    def forward(self, rows: torch.Tensor | None) -> torch.Tensor:
        if rows is None:  # a step without words
            return self.out(torch.ones(1, 8, dtype=torch.float64))
        return self.out(self.table(rows).tanh())


ROWS: list[list[list[int] | None]] = [
    [[3, 5, 5, 99], [5, 7, 3, 3]],  # different and overlapping, some twice
    [[0, 1], None],  # not on rank 1
    [None, [1, 2, 2]],
    [[11], [11]],
]
"""What each rank looks up, step by step."""


def train_words(model: Words, optimizers: list[Any], ranks: list[int], first: int) -> None:
    for rows in ROWS[first:]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [
            model(None if rows[rank] is None else torch.tensor(rows[rank])).sin().mean()
            for rank in ranks
        ]
        (sum(losses) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()


SPARSE: dict[str, tuple[Callable[[Any], Any], bool]] = {
    # the optimizer of the table, and whether a dense gradient does the same
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.5), True),
    "Adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=0.5), True),
    "SparseAdam": (lambda ps: torch.optim.SparseAdam(ps, lr=0.1), False),
}


@pytest.mark.parametrize("as_dense", [False, True], ids=["rows", "sparse_as_dense"])
@pytest.mark.parametrize("optimizer", SPARSE)
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.np(2)
def test_sparse_gradients_are_the_mean_of_the_dense_ones(
    optimizer: str, first: int, as_dense: bool
) -> None:
    """In the first step of all, too, a rank may not touch the table."""
    make, as_if_dense = SPARSE[optimizer]
    model, alone, dense = Words(True), Words(True), Words(False)

    def optimizers(model: Words) -> list[Any]:
        return [make([model.table.weight]), torch.optim.SGD(model.out.parameters(), lr=0.1)]

    inner = optimizers(model)
    seen: list[torch.Tensor] = []

    def look(*_: Any) -> None:
        gradient = model.table.weight.grad
        assert gradient is not None and gradient.is_sparse and gradient.is_coalesced()
        seen.append(gradient.to_dense())

    inner[0].register_step_pre_hook(look)
    wanted: list[torch.Tensor] = []
    reference = optimizers(dense if as_if_dense else alone)
    reference[0].register_step_pre_hook(
        lambda opt, *_: wanted.append(opt.param_groups[0]["params"][0].grad.to_dense())
    )
    wrapped = [
        hvd.DistributedOptimizer(
            inner[0], [("table", model.table.weight)], sparse_as_dense=as_dense
        ),
        hvd.DistributedOptimizer(inner[1], model.out.named_parameters()),
    ]
    train_words(model, wrapped, [hvd.rank()], first)
    train_words(dense if as_if_dense else alone, reference, [0, 1], first)
    assert len(seen) == len(wanted) == len(ROWS) - first
    for gradient, expected in zip(seen, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    close(model, dense if as_if_dense else alone, Words(True))
    same_on_all(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 1},
        {"groups": 2, "sparse_as_dense": True},
        {"backward_passes_per_step": 2},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"skip_unused_parameters": True},
        {"compression": hvd.Compression.fp16},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.np(2, 3)
def test_sparse_and_dense_gradients_in_one_optimizer(options: dict[str, Any]) -> None:
    rough = 1e-3 if "compression" in options else 1e-11
    model, alone = Words(True), Words(False)
    ranks = list(range(hvd.size()))
    share = hvd.size() if options.get("op") == hvd.Sum else 1
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.5 / share), **options)
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    rows = copy.deepcopy(ROWS)
    passes = options.get("backward_passes_per_step", 1)
    for step in range(0, len(rows), passes):
        optimizer.zero_grad()
        plain.zero_grad()
        for step_rows in rows[step : step + passes]:
            all_rows = [*step_rows, [5, 42]]

            def loss(model: Words, rank: int, all_rows: Any = all_rows) -> torch.Tensor:
                mine = all_rows[rank]
                return model(None if mine is None else torch.tensor(mine)).sin().mean()

            loss(model, hvd.rank()).backward()
            (sum(loss(alone, rank) for rank in ranks) / len(ranks)).backward()
        optimizer.step()
        plain.step()
    close(model, alone, Words(True), rough)
    same_on_all(model)


@pytest.mark.np(2)
def test_sparse_gradients_are_weighted_too() -> None:
    model, alone = Words(True), Words(False)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    batches = [[[3, 5, 5, 99, 0], [5]], [[7, 1], [1, 2, 3]]]
    for batch in batches:
        mine = torch.tensor(batch[hvd.rank()])
        optimizer.zero_grad()
        optimizer.weight = len(mine)
        model(mine).sin().mean().backward()
        optimizer.step()
        plain.zero_grad()
        alone(torch.tensor(batch[0] + batch[1])).sin().mean().backward()
        plain.step()
    close(model, alone, Words(True))
    same_on_all(model)


@pytest.mark.np(2)
def test_gradients_in_channels_last() -> None:
    torch.manual_seed(0)
    start = nn.Conv2d(3, 4, 3).double()
    model, alone = copy.deepcopy(start), copy.deepcopy(start)
    if hvd.rank() == 1:
        model = model.to(memory_format=torch.channels_last)
    optimizer = wrap(model)
    images = [torch.randn(2, 3, 5, 5, dtype=torch.float64) for _ in range(2)]
    x = images[hvd.rank()]
    model(x.to(memory_format=torch.channels_last) if hvd.rank() else x).square().mean().backward()
    optimizer.step()
    alone(torch.cat(images)).square().mean().backward()
    sgd(alone.parameters()).step()
    close(model, alone, start)
    assert torch.allclose(weights(model), weights(alone))
    same_on_all(model)


@pytest.mark.np(2)
def test_a_gradient_that_differs_in_shape_is_a_mismatch_and_the_rest_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2 + hvd.rank())})
    optimizer = wrap(model)

    def backward() -> None:
        sum(layer(torch.ones(1, 2)).sum() for layer in model.values()).backward()

    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match=r"b\.(weight|bias)"):
            backward()
            optimizer.step()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        optimizer.zero_grad()


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2)
def test_a_collective_between_backward_and_step_waits_for_nobody(groups: int | None) -> None:
    """Rank 0 has every gradient, so its backward waits for those that rank 1 has not started."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "ab"})
    optimizer = wrap(model, groups=groups)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model["a"](torch.ones(2, 3)).sum()
        if hvd.rank() == 0:
            loss = loss + model["b"](torch.ones(2, 3)).sum()
        loss.backward()
        hvd.allreduce(loss.detach(), name="loss")
        hvd.barrier()
        optimizer.step()
    same_on_all(model)
