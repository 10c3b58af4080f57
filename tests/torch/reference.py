"""What training in several ranks must equal: one process that trains on their joined batch.

Shared by the tests of the optimizer, which run in every rank; knows nothing of pytest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import horovod.torch as hvd
from horovod.common import basics

Make = Callable[[Any], torch.optim.Optimizer]


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def data(rank: int, step: int = 0, rows: int = 6) -> torch.Tensor:
    """A rank's batch of one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def joined(ranks: Iterable[int], step: int = 0) -> torch.Tensor:
    """The batches of several ranks as one."""
    return torch.cat([data(rank, step) for rank in ranks])


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A mean over the samples, so that the mean over ranks is that of the joined batch."""
    x = x.to(next(model.parameters()).dtype)
    return (model(x) - x[:, :2].sin()).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrap(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(optimizer or sgd(model.parameters()), **options)


def clip(model: nn.Module) -> None:
    """To a norm that the gradients here are above."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1


def train(
    optimizer: Any,
    model: nn.Module,
    ranks: Iterable[int],
    windows: Iterable[int] = (1, 1, 1),
    change: Callable[[nn.Module], object] | None = None,
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
) -> None:
    """The loop of one process: a step for each window of so many batches of the ranks.

    Args:
        change: what is done to the gradients between backward and step.
    """
    step = 0
    ranks = list(ranks)
    for window in windows:
        optimizer.zero_grad()
        for _ in range(window):
            loss_of(model, joined(ranks, step)).backward()
            step += 1
        if change is not None:
            change(model)
        optimizer.step()


def trains_as_one_process(
    options: dict[str, Any] | Callable[[Any], dict[str, Any]] | None = None,
    make: Make = sgd,
    model: Any = None,
    rough: float = 1e-11,
    **loop: Any,
) -> Any:
    """Asserts that ranks that run `train`, each on its own data, end where one process does.

    Args:
        options: of the DistributedOptimizer, or what makes them for the model.
        make: makes the optimizer to wrap.
        model: where training begins.
        rough: the error allowed to the way that the weights went, relative, in the L2 norm.
        **loop: further arguments of `train`.

    Returns:
        The distributed optimizer.
    """
    start = net() if model is None else model
    model, alone = copy.deepcopy(start), copy.deepcopy(start)
    chosen = options(model) if callable(options) else options or {}
    optimizer = wrap(model, make(model.parameters()), **chosen)
    train(optimizer, model, [hvd.rank()], **loop)
    train(make(alone.parameters()), alone, range(hvd.size()), **loop)
    close(model, alone, start, rough)
    same_on_all(model)
    return optimizer


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def close(model: nn.Module, alone: nn.Module, start: nn.Module, rough: float = 1e-11) -> None:
    """Asserts that two models went the same way from `start`."""
    way = weights(alone) - weights(start)
    error = float((weights(model) - weights(alone)).norm() / way.norm())
    assert error <= rough, f"the error is {error} of the way"


def same_on_all(model: nn.Module) -> None:
    """Asserts that all ranks have the same weights, bit for bit."""
    mine = model.state_dict()
    for state in hvd.allgather_object(mine):
        for key, value in state.items():
            assert torch.equal(value, mine[key]), key


def tensors_sent() -> int:
    return int(basics.engine().counters()["calls"])


def by_model(model: Any) -> dict[str, Any]:
    """Explicit groups: two parameters in one, one in another, the rest in none."""
    parameters = list(model.parameters())
    return {"groups": [[parameters[2], parameters[0]], [parameters[1]]]}


GROUPINGS: dict[str, Any] = {"single": {}, "two groups": {"groups": 2}, "lists": by_model}
"""Options for the ways in which gradients are put together."""


def merge(a: torch.Tensor, wa: int, b: torch.Tensor, wb: int) -> torch.Tensor:
    dot = (a * b).sum()
    of_a = 1 - wa / (wa + wb) * dot / (a * a).sum()
    of_b = 1 - wb / (wa + wb) * dot / (b * b).sum()
    return of_a * a + of_b * b


def adasum(terms: list[torch.Tensor]) -> torch.Tensor:
    """Of the ranks' vectors: neighbours in pairs, the pairs in pairs; what is over comes last."""
    level = [(term.double(), 1) for term in terms]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        merged = [(merge(a, wa, b, wb), wa + wb) for (a, wa), (b, wb) in pairs]
        level = merged + (level[-1:] if len(level) % 2 else [])
    return level[0][0]
