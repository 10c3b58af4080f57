"""Automatic mixed precision: torch's loop for one process, unchanged, is right in several ranks."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from reference import close, data, joined, loss_of, net, same_on_all, sgd, weights, wrap

STEPS = 6
BAD_STEP = 3
SCALE = 2.0**10


def plain(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    scaler.step(optimizer)


def clipped(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)


def synchronized(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    """The order that needs no more than the calls of old."""
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        clipped(scaler, optimizer, model)


LOOPS = {"plain": plain, "clipped": clipped, "synchronized": synchronized}


def train(
    model: nn.Module,
    optimizer: Any,
    ranks: list[int],
    loop: str,
    dtype: torch.dtype,
    bad_rank: int | None,
    passes: int = 1,
) -> tuple[list[float], list[float]]:
    """The loss scale and the first weight after each step."""
    scaler = torch.amp.GradScaler(device="cpu", init_scale=SCALE, growth_interval=2)
    scales, firsts = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(passes):
            losses = []
            for rank in ranks:
                with torch.autocast("cpu", dtype=dtype):
                    loss = loss_of(model, data(rank, passes * step + i))
                bad = step == BAD_STEP and rank == bad_rank
                losses.append(loss * math.inf if bad else loss)
            scaler.scale(sum(losses) / len(ranks)).backward()
        LOOPS[loop](scaler, optimizer, model)
        scaler.update()
        scales.append(scaler.get_scale())
        firsts.append(next(model.parameters()).flatten()[0].item())
    return scales, firsts


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "bf16": {"compression": hvd.Compression.bf16, "groups": 2},
    "passes": {"backward_passes_per_step": 2},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.np(2, 3)
def test_all_ranks_skip_a_step_together(loop: str, variant: str, dtype: torch.dtype) -> None:
    """The gradient of one rank alone is infinite once; all go on as one process would."""
    options = VARIANTS[variant]
    passes = options.get("backward_passes_per_step", 1)
    model, alone = net(dtype=torch.float32), net(dtype=torch.float32)
    optimizer = wrap(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scales, firsts = train(model, optimizer, [hvd.rank()], loop, dtype, 1, passes)
    wanted, _ = train(
        alone, sgd(alone.parameters()), list(range(hvd.size())), loop, dtype, 1, passes
    )
    assert scales == wanted
    assert scales[BAD_STEP] == scales[BAD_STEP - 1] / 2
    moved = [a != b for a, b in itertools.pairwise(firsts)]
    assert moved == [step + 1 != BAD_STEP for step in range(STEPS - 1)]
    same_on_all(model)
    close(model, alone, net(dtype=torch.float32), 0.02 if "compression" in options else 0.01)


@pytest.mark.np(2)
def test_the_scale_grows_and_shrinks_alike_when_fp16_overflows() -> None:
    """On one rank alone, and in the sum of all alone."""
    for size in ([90000.0, 1.0], [40000.0, 40000.0]):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = wrap(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-6),
            op=hvd.Sum,
            compression=hvd.Compression.fp16,
        )
        scaler = torch.amp.GradScaler(device="cpu", init_scale=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([size[hvd.rank()]])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        scales = hvd.allgather_object(scaler.get_scale())
        assert scales[0] == scales[1] == 0.5
        same_on_all(model)


@pytest.mark.np(2)
def test_several_models_and_optimizers_with_one_scaler() -> None:
    models = [net(0, torch.float32), net(1, torch.float32)]
    optimizers = [wrap(model) for model in models]
    scaler = torch.amp.GradScaler(device="cpu", init_scale=SCALE)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        bad = math.inf if step == 1 and hvd.rank() == 1 else 1.0
        losses = [loss_of(model, data(hvd.rank(), step)) for model in models]
        scaler.scale(losses[0] * bad + losses[1]).backward()
        before = [weights(model) for model in models]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(weights(m), b) for m, b in zip(models, before, strict=True)]
        assert moved == [step != 1, True]
    assert scaler.get_scale() == SCALE / 2
    for model in models:
        same_on_all(model)


@pytest.mark.np(2)
def test_gradients_keep_their_dtype() -> None:
    """Weights in bf16, autocast around weights in fp32, and the two in one optimizer."""
    model = nn.ModuleList([net(0, torch.bfloat16), net(1, torch.float32)])
    optimizer = wrap(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = sum(loss_of(each, joined([hvd.rank()])) for each in model)
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype
    optimizer.step()
    same_on_all(model)
