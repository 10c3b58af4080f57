"""DistributedOptimizer(op=Adasum): the ranks' steps are combined, not their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from reference import adasum, data, loss_of, net, same_on_all, wrap

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=5e-3),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.np(2, 3)
def test_adasum_reduces_what_each_ranks_step_changes(optimizer: str, passes: int) -> None:
    make = OPTIMIZERS[optimizer]
    model = net()
    inner = make(model.parameters())
    chosen = wrap(model, inner, op=hvd.Adasum, backward_passes_per_step=passes)
    # Each rank's own optimizer, whose state is of its gradients alone; all at the same weights.
    ranks = [net() for _ in range(hvd.size())]
    plain = [make(each.parameters()) for each in ranks]
    for window in range(4):
        chosen.zero_grad()
        old = [p.detach().clone() for p in model.parameters()]
        for i in range(passes):
            loss_of(model, data(hvd.rank(), passes * window + i)).backward()
        chosen.step()
        for rank, (each, own) in enumerate(zip(ranks, plain, strict=True)):
            own.zero_grad()
            for i in range(passes):
                loss_of(each, data(rank, passes * window + i)).backward()
            own.step()
        with torch.no_grad():
            for p, before, *after in zip(
                model.parameters(), old, *(each.parameters() for each in ranks), strict=True
            ):
                wanted = before + adasum([q - before for q in after])
                torch.testing.assert_close(p, wanted, rtol=1e-10, atol=1e-13)
                for q in after:
                    q.copy_(p)
        same_on_all(model)


@pytest.mark.np(2)
def test_adasum_mode_leaves_nothing_to_wait_for_before_the_step() -> None:
    model = net()
    optimizer = wrap(model, op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.op == hvd.Adasum
    loss_of(model, data(hvd.rank())).backward()
    optimizer.synchronize()
    with pytest.raises(AssertionError), optimizer.skip_synchronize():
        pass

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, data(hvd.rank()))
        loss.backward()
        return loss

    before = copy.deepcopy(model)
    assert optimizer.step(closure).item() == loss_of(before, data(hvd.rank())).item()
    same_on_all(model)


@pytest.mark.np(2)
def test_a_step_that_fails_is_not_taken() -> None:
    parameter = nn.Parameter(torch.full((2 + hvd.rank(),), 10.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Adasum)
    parameter.sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="shape"):
        optimizer.step()
    assert (parameter == 10).all()


@pytest.mark.np(2)
def test_each_parameter_has_a_residual_of_its_own() -> None:
    moved, still = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([moved, still], lr=0.1),
        op=hvd.Adasum,
        compression=hvd.Compression.error_feedback(hvd.Compression.fp16),
    )
    for _ in range(3):
        optimizer.zero_grad()
        ((moved * torch.rand(8)).sum() + 0 * still.sum()).backward()
        optimizer.step()
    assert (still == 0).all() and not (moved == 0).any()
