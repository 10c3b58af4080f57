"""Training with 1, 2 and 4 processes on the same global batch gives the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd

BATCH = 16  # in all, shared out equally
STEPS = 100

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=5e-3),
}


def train(optimizer: str, dtype: str) -> dict[str, Any]:
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
    distributed = hvd.DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()), named_parameters=model.named_parameters()
    )
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8 * BATCH, 1, 8, 8, dtype=kind, generator=generator)
    labels = images.mean((1, 2)).abs().argmax(1) % 4
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    first = None
    share = BATCH // hvd.size()
    for step in range(STEPS):
        start = step % 8 * BATCH + hvd.rank() * share
        mine = slice(start, start + share)
        distributed.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        distributed.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        first = first if first is not None else weights(model)
    last = weights(model)
    for other in hvd.allgather_object(last):
        assert torch.equal(other, last)  # all ranks, bit for bit
    return {"first": first, "last": last, "losses": losses}


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_does_not_depend_on_the_number_of_processes(
    run_in: Callable[..., list[Any]], optimizer: str
) -> None:
    for dtype in ("float64", "float32"):
        runs = [run_in(n, train, optimizer=optimizer, dtype=dtype)[0] for n in (1, 2, 4)]
        assert runs[0]["losses"][-1] < 0.7 * runs[0]["losses"][0]
        for run in runs[1:]:
            if dtype == "float64":
                assert distance(run["last"], runs[0]["last"]) <= 1e-12
            else:
                assert distance(run["first"], runs[0]["first"]) <= 1e-6
            for loss, wanted in zip(run["losses"], runs[0]["losses"], strict=True):
                assert loss == pytest.approx(wanted, rel=0.01)


def plain(optimizer: str) -> torch.Tensor:
    """The same without any of ours, for what one process must give."""
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        inner = OPTIMIZERS[optimizer](model.parameters())
        if wrapped:
            inner = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(inner, root_rank=0)
        for _ in range(5):
            inner.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            inner.step()
        if not wrapped:
            reference = weights(model)
    assert torch.equal(weights(model), reference)
    return reference


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_gives_what_plain_torch_gives(
    run_in: Callable[..., list[Any]], optimizer: str
) -> None:
    run_in(1, plain, optimizer=optimizer)


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
