"""Training in any number of processes gives the weights of one process on the joined batch."""

from __future__ import annotations

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
    trains_as_one_process,
    weights,
    wrap,
)

BATCH = 24  # in all, shared out equally
STEPS = 50

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float]] = {
    # with the error allowed in float64, relative, after all steps
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), 1e-12),
    "AdamW": (lambda ps: torch.optim.AdamW(ps, lr=5e-3), 1e-12),
    "LBFGS": (lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3), 1e-10),
}


def run(optimizer: str, dtype: str, wrapped: bool = True) -> dict[str, Any]:
    """Weights after one step and after all, and the loss of the global batch at every step."""
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
    ).to(kind)
    chosen: Any = OPTIMIZERS[optimizer][0](model.parameters())
    if wrapped:
        chosen = wrap(model, chosen)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(chosen, root_rank=0)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4 * BATCH, 1, 8, 8, dtype=kind, generator=generator)
    labels = images.mean((1, 2)).abs().argmax(1) % 4
    losses = []
    first = None
    share = BATCH // hvd.size()
    for step in range(STEPS):
        # LBFGS needs the same batch in every step: with another its curvature is noise, and what
        # it makes of rounding errors too.
        batch = 0 if optimizer == "LBFGS" else step % 4
        start = batch * BATCH + hvd.rank() * share
        mine = slice(start, start + share)

        def closure(mine: slice = mine) -> torch.Tensor:
            chosen.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            return loss

        if optimizer == "LBFGS":
            loss = chosen.step(closure)
        else:
            loss = closure()
            chosen.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        first = first if first is not None else weights(model)
    same_on_all(model)
    return {"first": first, "last": weights(model), "losses": losses}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_does_not_depend_on_the_number_of_processes(
    run_in: Callable[..., list[Any]], optimizer: str
) -> None:
    # The bound in float32 is that of one evaluation; a step of LBFGS has several.
    for dtype in ("float64",) if optimizer == "LBFGS" else ("float64", "float32"):
        (alone,) = run_in(1, run, optimizer=optimizer, dtype=dtype, wrapped=False)
        assert alone["losses"][-1] < 0.7 * alone["losses"][0]
        for size in (1, 2, 3, 4):
            found = run_in(size, run, optimizer=optimizer, dtype=dtype)[0]
            if size == 1:
                assert torch.equal(found["last"], alone["last"])
            if dtype == "float64":
                assert distance(found["last"], alone["last"]) <= OPTIMIZERS[optimizer][1]
            else:
                assert distance(found["first"], alone["first"]) <= 1e-6
            for loss, wanted in zip(found["losses"], alone["losses"], strict=True):
                assert loss == pytest.approx(wanted, rel=0.01)


# Rows of options that change the way and not the result.
WAYS: list[dict[str, Any]] = [
    {"compression": hvd.Compression.none},
    {"gradient_predivide_factor": 3.0},
    {"groups": 2},
    {"groups": 3, "gradient_predivide_factor": 0.5},
    {"groups": 99},  # more than there are parameters
    {"backward_passes_per_step": 2},
    {"backward_passes_per_step": 3, "groups": 2, "gradient_predivide_factor": 2.0},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.np(2, 3)
def test_training_does_not_depend_on_the_way_of_reducing(
    optimizer: str, options: dict[str, Any]
) -> None:
    passes = options.get("backward_passes_per_step", 1)
    make = OPTIMIZERS[optimizer][0]
    trains_as_one_process(options, make=make, rough=1e-10, windows=[passes] * 8)


@pytest.mark.filterwarnings("ignore:num_groups")
@pytest.mark.np(2)
def test_the_old_spelling_of_groups_trains_too() -> None:
    trains_as_one_process({"num_groups": 2})


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.np(2, 3)
def test_a_sum_is_the_mean_times_the_number_of_ranks(groups: int | None) -> None:
    model, alone = net(), net()
    optimizer = wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1 / hvd.size(), momentum=0.9),
        op=hvd.Sum,
        groups=groups,
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, data(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(alone, joined(range(hvd.size()), step)).backward()
        plain.step()
    close(model, alone, net())
    same_on_all(model)


# ---------------------------------------------------------------------------------------------


def sums(seed: int) -> list[torch.Tensor]:
    """Results of many allreduces, submitted in an order of the rank's own."""
    shapes = [(1,), (7,), (1000,), (33, 5), (20_000,)] * 4
    generator = torch.Generator().manual_seed(hvd.rank())
    terms = [
        torch.randn(shape, generator=generator).to(dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for shape in shapes
    ]
    order = torch.randperm(len(terms), generator=torch.Generator().manual_seed(seed + hvd.rank()))
    handles = {i: hvd.allreduce_async(terms[i], name=f"bits.{i}") for i in order.tolist()}
    return [hvd.synchronize(handles[i]) for i in range(len(terms))]


@pytest.mark.timeout(120)
def test_bits_do_not_depend_on_order_or_fusion(
    run_in: Callable[..., list[Any]], worlds: Any
) -> None:
    first = run_in(3, sums, seed=0)
    for seed in range(1, 4):
        for mine, wanted in zip(run_in(3, sums, seed=seed), first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
    for threshold in ("0", "1024"):
        env = {"HOROVOD_FUSION_THRESHOLD": threshold}
        other = worlds.run(3, __file__, "sums", {"seed": 9}, env=env)
        for mine, wanted in zip(other, first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
