"""DistributedOptimizer: backward passes, what is reduced between them and the step, and its use."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from reference import (
    GROUPINGS,
    by_model,
    clip,
    close,
    data,
    joined,
    loss_of,
    net,
    same_on_all,
    sgd,
    tensors_sent,
    train,
    trains_as_one_process,
    weights,
    wrap,
)

# ---------------------------------------------------------------------------------------------
# Accumulation


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.np(2)
def test_a_short_last_window_is_reduced_as_it_is(grouping: str) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        chosen = GROUPINGS[grouping]
        chosen = chosen(model) if callable(chosen) else chosen
        return {"backward_passes_per_step": 4, **chosen}

    optimizer = trains_as_one_process(options, windows=[4, 4, 2] * 2)  # two epochs of ten
    assert set(optimizer._allreduce_delay.values()) == {4}


@pytest.mark.parametrize("passes", [2, 4])
@pytest.mark.np(2)
def test_a_step_after_every_pass_trains_as_well(passes: int) -> None:
    trains_as_one_process({"backward_passes_per_step": passes}, windows=[1] * 5)


@pytest.mark.np(2)
def test_the_number_of_passes_can_change() -> None:
    model, alone = net(), net()
    optimizer, plain = wrap(model), sgd(alone.parameters())
    for passes in (1, 3, 2):
        optimizer.set_backward_passes_per_step(passes)
        assert optimizer.backward_passes_per_step == passes
        train(optimizer, model, [hvd.rank()], windows=[passes] * 2)
        train(plain, alone, range(hvd.size()), windows=[passes] * 2)
    close(model, alone, net())
    same_on_all(model)


def accumulate(optimizer: Any, model: nn.Module, x: list[torch.Tensor]) -> None:
    for each in x:
        loss_of(model, each).backward()


def accumulate_in_no_sync(optimizer: Any, model: nn.Module, x: list[torch.Tensor]) -> None:
    with optimizer.no_sync():
        accumulate(optimizer, model, x[:2])
        with optimizer.no_sync():
            pass
        accumulate(optimizer, model, x[2:-1])
    accumulate(optimizer, model, x[-1:])


ACCUMULATIONS = {"passes": (accumulate, 4), "no_sync": (accumulate_in_no_sync, 1)}


@pytest.mark.parametrize("name", ACCUMULATIONS)
@pytest.mark.np(2)
def test_each_parameter_is_reduced_once_per_window(name: str) -> None:
    way, passes = ACCUMULATIONS[name]
    model, alone = net(), net()
    optimizer = wrap(model, backward_passes_per_step=passes)
    plain = sgd(alone.parameters())
    sent = []
    for _ in range(3):
        before = tensors_sent()
        way(optimizer, model, [data(hvd.rank(), step) for step in range(4)])
        assert set(optimizer._allreduce_delay.values()) == {0}
        optimizer.step()
        optimizer.zero_grad()
        sent.append(tensors_sent() - before)
        accumulate(plain, alone, [joined(range(2), step) for step in range(4)])
        plain.step()
        plain.zero_grad()
    assert sent[1:] == [4, 4]  # ranks come to know each other's gradients in the first
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2)
def test_passes_after_the_window_are_added_to_its_mean(groups: int | None) -> None:
    """A mean can be added to and reduced again; that costs traffic, which is said once."""
    model, alone = net(), net()
    optimizer, plain = wrap(model, groups=groups), sgd(alone.parameters())
    warned = []
    for window in (1, 2, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(window):
                loss_of(model, data(hvd.rank(), step)).backward()
        warned.append(["backward_passes_per_step" in str(each.message) for each in caught])
        optimizer.step()
        optimizer.zero_grad()
        train(plain, alone, range(2), windows=[window])
    assert warned == [[], [True], []]
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.parametrize("weight", [None, 3])
@pytest.mark.np(2)
def test_passes_after_the_window_are_refused_where_they_would_count_twice(
    weight: int | None,
) -> None:
    model = net()
    for passes in (1, 2):
        optimizer = wrap(
            model, backward_passes_per_step=passes, op=hvd.Average if weight else hvd.Sum
        )
        optimizer.weight = weight
        for _ in range(passes):
            loss_of(model, data(hvd.rank())).backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            loss_of(model, data(hvd.rank())).backward()
        optimizer.zero_grad()
        train(optimizer, model, [hvd.rank()], windows=[passes] * 2)
        same_on_all(model)


@pytest.mark.np(2)
def test_a_graph_of_the_gradients_is_refused() -> None:
    model = net()
    optimizer = wrap(model)
    with pytest.raises(AssertionError, match="create_graph"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model, data(0)).backward(create_graph=True)
    optimizer.zero_grad()
    train(optimizer, model, [hvd.rank()])
    same_on_all(model)


class Heads(nn.Module):
    """Two losses that share a body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4).double()
        self.heads = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.body(x).tanh()
        return [(head(x) - 1).square().mean() for head in self.heads]


def same_loss_twice(model: Heads, x: torch.Tensor) -> None:
    loss = sum(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses_of_one_graph(model: Heads, x: torch.Tensor) -> None:
    first, second = model(x)
    first.backward(retain_graph=True)
    second.backward()


def two_losses_of_two_graphs(model: Heads, x: torch.Tensor) -> None:
    for i in range(2):
        model(x)[i].backward()


def losses_of_disjoint_parameters(model: Heads, x: torch.Tensor) -> None:
    for head in model.heads:
        head(x).square().mean().backward()
    model.body(x).square().mean().backward()


SEVERAL: dict[str, tuple[Callable[[Any, torch.Tensor], None], int]] = {
    "same loss twice": (same_loss_twice, 2),
    "one graph": (two_losses_of_one_graph, 2),
    "two graphs": (two_losses_of_two_graphs, 2),
    "disjoint parameters": (losses_of_disjoint_parameters, 1),
}


@pytest.mark.parametrize("losses", SEVERAL)
@pytest.mark.np(2)
def test_several_backward_calls_fill_one_window(losses: str) -> None:
    backward, passes = SEVERAL[losses]
    model, alone = Heads(), Heads()
    optimizer, plain = wrap(model, backward_passes_per_step=passes), sgd(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        backward(model, data(hvd.rank(), step))
        optimizer.step()
        plain.zero_grad()
        backward(alone, joined(range(2), step))
        plain.step()
    close(model, alone, Heads())
    same_on_all(model)


@pytest.mark.np(2)
def test_a_window_can_be_thrown_away() -> None:
    """As by a loop that steps only if the loss, or the norm of the gradients, is finite."""
    for forget in (
        lambda optimizer, model: optimizer.zero_grad(),
        lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
        lambda optimizer, model: model.zero_grad(),
    ):
        model, alone = net(), net()
        optimizer, plain = wrap(model), sgd(alone.parameters())
        for step in range(4):
            forget(optimizer, model)
            loss_of(model, data(hvd.rank(), step)).backward()
            plain.zero_grad()
            loss_of(alone, joined(range(2), step)).backward()
            if step % 2:
                optimizer.step()
                plain.step()
        close(model, alone, net())
        same_on_all(model)


@pytest.mark.np(
    2, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
)
def test_a_rank_that_drops_what_others_step_with_does_not_go_on_in_silence() -> None:
    model = net()
    optimizer = wrap(model)
    loss_of(model, data(hvd.rank())).backward()
    if hvd.rank() == 0:
        optimizer.zero_grad()
    else:
        optimizer.step()
    with pytest.raises(hvd.HorovodInternalError, match="dropped1"):
        loss_of(model, data(hvd.rank(), 1)).backward()


# ---------------------------------------------------------------------------------------------
# Gradients between backward and step


CLIPPED: dict[str, tuple[Any, float]] = {
    "plain": ({}, 1e-11),
    "two groups": ({"groups": 2}, 1e-11),
    "lists": (by_model, 1e-11),
    "predivision": ({"gradient_predivide_factor": 3.0}, 1e-11),
    "passes": ({"backward_passes_per_step": 2}, 1e-11),
    "fp16": ({"compression": hvd.Compression.fp16}, 1e-3),
    "bf16": ({"compression": hvd.Compression.bf16}, 1e-2),
    "groups in fp16": ({"compression": hvd.Compression.fp16, "groups": 2}, 1e-3),
}


@pytest.mark.parametrize("options", CLIPPED)
@pytest.mark.np(2)
def test_clipping_is_written_as_for_one_process(options: str) -> None:
    chosen, rough = CLIPPED[options]
    windows = [2] * 3 if options == "passes" else [1] * 3
    trains_as_one_process(chosen, rough=rough, windows=windows, change=clip)


@pytest.mark.np(2)
def test_synchronize_clip_and_step() -> None:
    model, alone = net(), net()
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, data(hvd.rank(), step)).backward()
        optimizer.synchronize()
        clip(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
    train(sgd(alone.parameters()), alone, range(2), change=clip)
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.np(2)
def test_a_step_after_synchronize_warns_once() -> None:
    model, alone = net(), net()
    optimizer, plain = wrap(model), sgd(alone.parameters())
    loss_of(model, data(hvd.rank())).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(caught) == 1
    text = "optimizer.step() called without optimizer.skip_synchronize()"
    assert text in str(caught[0].message)
    assert caught[0].filename == __file__
    # Reduced twice or once, the mean is the same.
    train(plain, alone, range(2), windows=[1])
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", ["in place", "replaced"])
@pytest.mark.np(2)
def test_a_gradient_changed_while_it_is_reduced_is_an_error(rank: int, change: str) -> None:
    model = Heads()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def backward() -> None:
        """Without the second head: the window isn't full at the end of backward."""
        model(data(hvd.rank()))[0].backward()

    backward()
    if hvd.rank() == rank:
        gradient = model.body.weight.grad
        assert gradient is not None
        if change == "in place":
            gradient.mul_(0.5)
        else:
            model.body.weight.grad = gradient * 0.5
        with pytest.raises(RuntimeError, match=r"(?s)body\.weight.*synchronize\(\)"):
            optimizer.step()
    else:
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.zero_grad()
    backward()
    optimizer.synchronize()  # what the message asks for
    clip(model)
    with optimizer.skip_synchronize():
        optimizer.step()
    same_on_all(model)


# ---------------------------------------------------------------------------------------------
# Closures


CLOSURES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, max_iter=5),
    "LBFGS with line search": lambda ps: torch.optim.LBFGS(
        ps, max_iter=5, line_search_fn="strong_wolfe"
    ),
}


@pytest.mark.parametrize("make", CLOSURES)
@pytest.mark.parametrize("options", ["plain", "two groups", "clipped"])
@pytest.mark.np(2)
def test_every_evaluation_of_a_closure_is_of_all_ranks(make: str, options: str) -> None:
    start = net()
    model, alone = net(), net()
    # Clipping makes the curvature that LBFGS sees, and with it rounding errors, arbitrarily large.
    steps = 1 if options == "clipped" else 3

    def run(optimizer: Any, model: nn.Module, ranks: list[int]) -> tuple[list[float], int]:
        evaluations = 0

        def closure() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = loss_of(model, joined(ranks))
            loss.backward()
            if options == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)], evaluations

    groups = {"groups": 2} if options == "two groups" else {}
    optimizer = wrap(model, CLOSURES[make](model.parameters()), **groups)
    losses, evaluations = run(optimizer, model, [hvd.rank()])
    wanted, needed = run(CLOSURES[make](alone.parameters()), alone, [0, 1])
    assert evaluations == needed
    assert losses == pytest.approx(wanted, rel=1e-9)
    same_on_all(model)
    close(model, alone, start, 1e-8)


@pytest.mark.parametrize("kind", ["float", "none", "pair"])
@pytest.mark.np(2)
def test_what_a_closure_returns_is_returned(kind: str) -> None:
    model, alone = net(), net()
    optimizer = wrap(model)

    def closure() -> object:
        optimizer.zero_grad()
        loss = loss_of(model, data(hvd.rank()))
        loss.backward()
        return {"float": loss.item(), "none": None, "pair": ("loss", 1)}[kind]

    for _ in range(3):
        mean = pytest.approx(loss_of(model, joined([0, 1])).item(), rel=1e-12)
        found = optimizer.step(closure)
        assert found == {"float": mean, "none": None, "pair": ("loss", 1)}[kind]
    plain = sgd(alone.parameters())
    for _ in range(3):
        train(plain, alone, [0, 1], windows=[1])
    close(model, alone, net())
    same_on_all(model)


# ---------------------------------------------------------------------------------------------
# Ranks that count for more


def rows_of(rank: int, step: int) -> int:
    """How many samples each rank has in each step; rank 0 has none in some."""
    return (3 * rank + 5 * step) % 7 * (1 + rank)


def weighted(
    windows: list[int], change: Callable[[nn.Module], object] | None = None, **options: Any
) -> None:
    model, alone = net(), net()
    optimizer, plain = wrap(model, **options), sgd(alone.parameters())
    step = 0
    for window in windows:
        batches = [
            [data(rank, step + i, rows_of(rank, step + i)) for rank in range(hvd.size())]
            for i in range(window)
        ]
        optimizer.zero_grad()
        for batch in batches:
            mine = batch[hvd.rank()]
            optimizer.weight = len(mine)
            assert optimizer.weight == len(mine)
            loss_of(model, mine).backward()
        plain.zero_grad()
        loss_of(alone, torch.cat([x for batch in batches for x in batch])).backward()
        for each in (model, alone):
            if change is not None:
                change(each)
        optimizer.step()
        plain.step()
        step += window
    close(model, alone, net(), 1e-3 if "compression" in options else 1e-11)
    same_on_all(model)


WEIGHTED: dict[str, dict[str, Any]] = {
    "plain": {"windows": [1] * 7},
    "passes": {"windows": [2, 2, 2], "backward_passes_per_step": 2},
    "short window": {"windows": [4, 2], "backward_passes_per_step": 4},
    "one group": {"windows": [1] * 7, "groups": 1},
    "two groups": {"windows": [1] * 7, "groups": 2},
    "clipped": {"windows": [1] * 7, "change": clip},
    "predivision": {"windows": [1] * 3, "gradient_predivide_factor": 2.0},
    "fp16": {"windows": [1] * 7, "compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("case", WEIGHTED)
@pytest.mark.np(2, 3)
def test_uneven_batches_equal_the_joined_batch(case: str) -> None:
    assert rows_of(0, 0) == 0  # a rank may have no sample
    weighted(**WEIGHTED[case])


@pytest.mark.np(2, 3)
def test_a_closure_sees_the_loss_that_belongs_to_weighted_gradients() -> None:
    batches = [data(rank, 0, rows_of(rank, 0)) for rank in range(hvd.size())]
    model, alone = net(), net()
    plain = torch.optim.LBFGS(alone.parameters(), lr=0.5, max_iter=4)
    optimizer = wrap(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))
    optimizer.weight = len(batches[hvd.rank()])

    def evaluate(which: Any, of: nn.Module, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            which.zero_grad()
            loss = loss_of(of, batch)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        mine = optimizer.step(evaluate(optimizer, model, batches[hvd.rank()]))
        joined = plain.step(evaluate(plain, alone, torch.cat(batches)))
        torch.testing.assert_close(mine, joined.detach(), rtol=1e-9, atol=1e-12)
    close(model, alone, net(), 1e-9)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2)
def test_what_counts_for_nothing_may_be_nan(groups: int | None) -> None:
    """As a mean over the tokens of a batch that has none."""
    model, alone = net(), net()
    optimizer, plain = wrap(model, groups=groups), sgd(alone.parameters())
    for step in range(2):
        empty = step == hvd.rank()
        optimizer.zero_grad()
        optimizer.weight = 0 if empty else 7
        (loss_of(model, data(hvd.rank(), step)) * (math.nan if empty else 1)).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(alone, data(1 - step, step)).backward()
        plain.step()
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.np(2)
def test_weights_can_come_and_go() -> None:
    model, alone = net(), net()
    optimizer, plain = wrap(model), sgd(alone.parameters())
    for step, weight in enumerate([None, 0.5, 3, None, 2.0]):
        optimizer.zero_grad()
        optimizer.weight = weight if weight is None else weight * (1 + hvd.rank())
        loss_of(model, data(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        losses = [loss_of(alone, data(rank, step)) for rank in range(2)]
        loss = sum(losses) / 2 if weight is None else (losses[0] + 2 * losses[1]) / 3
        loss.backward()
        plain.step()
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2)
def test_a_weight_that_only_one_rank_sets_is_a_mismatch_on_all(groups: int | None) -> None:
    model = net()
    optimizer = wrap(model, groups=groups)
    train(optimizer, model, [hvd.rank()])
    optimizer.zero_grad()
    if hvd.rank() == 1:
        optimizer.weight = 3
    with pytest.raises(hvd.HorovodInternalError):
        loss_of(model, data(hvd.rank())).backward()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.weight = None
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(optimizer, model, [hvd.rank()])
    same_on_all(model)


@pytest.mark.np(1, 2)
def test_a_weight_is_a_number_of_at_least_zero() -> None:
    optimizer = wrap(net())
    assert optimizer.weight is None
    for wrong in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            optimizer.weight = wrong
    with pytest.raises((TypeError, ValueError)):
        optimizer.weight = "many"
    assert optimizer.weight is None


@pytest.mark.np(2)
def test_if_no_rank_has_a_sample_the_weights_stay() -> None:
    model = net()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = weights(model)
    optimizer.weight = 0
    loss_of(model, data(hvd.rank(), rows=0)).backward()
    optimizer.step()
    assert torch.equal(weights(model), before)


@pytest.mark.np(2)
def test_setting_the_weight_begins_a_pass() -> None:
    """Even if the passes of a window have no parameter in common."""
    model = nn.ModuleList([net(), net()])
    optimizer = wrap(model, backward_passes_per_step=2)
    for part, rows in zip(model, (3, 5), strict=True):
        optimizer.weight = rows * (1 + hvd.rank())
        loss_of(part, data(hvd.rank())).backward()
    optimizer.step()
    for part, rows in zip(model, (3, 5), strict=True):
        alone = net()
        losses = [rows * (1 + rank) * loss_of(alone, data(rank)) for rank in range(2)]
        (sum(losses) / ((3 + 5) * (1 + 2))).backward()  # type: ignore[union-attr]
        for p, q in zip(part.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.np(2)
def test_weights_leave_alone_gradients_that_no_pass_has_made() -> None:
    """Those of a second step, and those set by hand: in windows with passes and in ones without."""
    rank = hvd.rank()
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=0.1), [("a", a), ("b", b)])
    optimizer.weight = 1 + 2 * rank
    for _ in range(2):
        a.grad = b.grad = None
        (a * (1 + 4 * rank)).sum().backward()
        b.grad = torch.full((2,), 1.0 + 4 * rank)
        for _ in range(2):
            optimizer.step()
            for parameter in (a, b):
                torch.testing.assert_close(parameter.grad, torch.full((2,), 4.0))  # (1 + 3 * 5) / 4
    a.grad, b.grad = torch.full((2,), 1.0 + rank), None
    optimizer.step()
    torch.testing.assert_close(a.grad, torch.full((2,), 1.5))


@pytest.mark.np(2)
def test_weights_of_windows_that_the_model_throws_away_are_forgotten() -> None:
    model, alone = net(), net()
    optimizer, plain = wrap(model), sgd(alone.parameters())
    for step in range(4):
        model.zero_grad()
        rows = [2 + step, 6 - step]
        optimizer.weight = rows[hvd.rank()]
        loss_of(model, data(hvd.rank(), step, rows[hvd.rank()])).backward()
        if step % 2:
            optimizer.step()
            plain.zero_grad()
            joint = torch.cat([data(rank, step, n) for rank, n in enumerate(rows)])
            loss_of(alone, joint).backward()
            plain.step()
    close(model, alone, net())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.np(2)
def test_weights_set_once_hold_for_parameters_unfrozen_later(passes: int) -> None:
    model, alone = net(), net()
    model[0].requires_grad_(False)  # type: ignore[operator]
    optimizer, plain = wrap(model, backward_passes_per_step=passes), sgd(alone[2].parameters())
    plain.add_param_group({"params": list(alone[0].parameters())})
    rows = (3, 8)
    optimizer.weight = rows[hvd.rank()]
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(True)  # type: ignore[operator]
        optimizer.zero_grad()
        plain.zero_grad()
        for i in range(passes):
            batches = [data(rank, 2 * step + i, n) for rank, n in enumerate(rows)]
            loss_of(model, batches[hvd.rank()]).backward()
            (loss_of(alone, torch.cat(batches)) / passes).backward()
        if step == 0:
            for parameter in alone[0].parameters():
                parameter.grad = None
        optimizer.step()
        plain.step()
    close(model, alone, net())
    same_on_all(model)


@pytest.mark.np(1)
def test_one_process_with_weights_is_a_weighted_mean_over_passes() -> None:
    weighted([1] * 3 + [2, 2], backward_passes_per_step=2)
