"""SyncBatchNorm equals torch's batch normalization of the joined batch."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import horovod.torch as hvd

C = 3
PLAIN = {
    2: torch.nn.BatchNorm1d,
    3: torch.nn.BatchNorm1d,
    4: torch.nn.BatchNorm2d,
    5: torch.nn.BatchNorm3d,
}
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


def near(actual: Any, expected: Any, tolerance: float) -> None:
    if expected is None:
        assert actual is None
        return
    assert actual.shape == expected.shape
    off = (actual.double() - expected.double()).norm()
    assert off <= tolerance * max(expected.double().norm(), 1.0), (off, actual, expected)


def batches(
    rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, seed: int = 0, mean: float = 5.0
) -> list[torch.Tensor]:
    """Everybody's batches, rounded to `dtype`, in float64."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(n, C, *rest, generator=generator, dtype=torch.float64) * 2 + mean for n in rows
    ]
    return [batch.to(dtype).double() for batch in made]


def layers(dimensions: int, **options: Any) -> tuple[Any, Any]:
    """The layer under test, and the reference in float64, with the same parameters."""
    layer, plain = hvd.SyncBatchNorm(C, **options), PLAIN[dimensions](C, **options).double()
    if options.get("affine", True):
        with torch.no_grad():
            for module in (layer, plain):
                module.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
                module.bias.copy_(torch.tensor([0.25, 0.5, -0.125]))
    return layer, plain


def compare(rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, **options: Any) -> None:
    """Two steps, each forward and backward with a gradient that differs element by element."""
    layer, plain = layers(2 + len(rest), **options)
    if dtype is torch.float64:
        layer.double()
    tolerance, me = TOLERANCE[dtype], hvd.rank()
    for seed in (1, 2):
        theirs = batches(rows, rest, dtype, seed)
        grads = batches(rows, rest, dtype, seed + 10, mean=0.0)
        joined = torch.cat(theirs).requires_grad_()
        expected = plain(joined)
        own = theirs[me].to(dtype).requires_grad_()
        output = layer(own)
        assert output.dtype is dtype
        near(output, expected.split(list(rows))[me], tolerance)
        for module in (layer, plain):
            module.zero_grad()
        output.backward(grads[me].to(dtype))
        expected.backward(torch.cat(grads))
        near(own.grad, joined.grad.split(list(rows))[me], 3 * tolerance)
        assert own.grad.dtype is dtype
        local = [parameter.grad for parameter in layer.parameters()]
        if local:
            for ours, whole in zip(
                hvd.grouped_allreduce(local, op=hvd.Sum), plain.parameters(), strict=True
            ):
                near(ours, whole.grad, 3 * tolerance)
    for name, expected in plain.named_buffers():
        near(getattr(layer, name), expected, min(tolerance, 1e-6))


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_equals_batch_norm_on_the_joined_batch(dtype: torch.dtype) -> None:
    everywhere = hvd.size()
    for rest in ((), (4,), (4, 3), (2, 3, 2)):
        compare([3, 5, 2][:everywhere], rest, dtype)


@pytest.mark.np(2, 3)
def test_batches_of_one_row_and_none() -> None:
    n = hvd.size()
    for rows in ([1, 1, 1], [1, 4, 1], [4, 0, 0], [0, 2, 0]):
        for rest in ((), (2, 2)):
            compare(rows[:n], rest, torch.float64)


@pytest.mark.np(2)
def test_options() -> None:
    compare([3, 5], (2,), torch.float64, affine=False)
    compare([3, 5], (2,), torch.float64, momentum=None)
    compare([3, 5], (2,), torch.float64, momentum=0.5, eps=0.1)
    compare([3, 5], (2,), torch.float64, track_running_stats=False)
    compare([3, 5], (2,), torch.float64, momentum=None, track_running_stats=False)


@pytest.mark.np(2)
def test_a_large_mean_costs_no_more_than_in_one_process() -> None:
    layer, plain = layers(2)
    theirs = [batch + 1e4 for batch in batches([300, 500], (), torch.float32)]
    joined = torch.cat(theirs).float()
    near(
        layer(theirs[hvd.rank()].float()),
        plain(joined.double()).split([300, 500])[hvd.rank()],
        1e-3,
    )
    near(layer.running_var, plain.running_var, 1e-4)


@pytest.mark.np(1, 2)
def test_evaluation_is_ordinary_and_local() -> None:
    layer, plain = layers(4)
    layer.running_mean.fill_(3.0)
    plain.running_mean.fill_(3.0)
    layer.eval(), plain.eval()
    if hvd.rank() == 0:  # nobody else is needed
        (batch,) = batches([4], (2, 2), torch.float32)
        near(layer(batch.float()), plain(batch), 1e-6)
        near(
            hvd.SyncBatchNorm(C, track_running_stats=False).eval()(batch.float()).mean((0, 2, 3))
            + 1,
            torch.ones(C),
            1e-6,
        )


@pytest.mark.np(1)
def test_one_rank_is_ordinary_batch_norm() -> None:
    compare([4], (2, 2), torch.float64)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        hvd.SyncBatchNorm(C)(torch.zeros(1, C))


@pytest.mark.np(2)
def test_one_value_a_channel_is_an_error_everywhere() -> None:
    layer = hvd.SyncBatchNorm(C)
    for rows in ([1, 0], [0, 0]):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(torch.zeros(rows[hvd.rank()], C))
    layer(torch.zeros(1, C))


@pytest.mark.np(2)
@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((3,), torch.float32, "at least 2D"),
        ((2, C + 1), torch.float32, "expected 3 channels"),
        ((2, C), torch.int64, "floating-point"),
    ],
)
def test_a_wrong_input_on_one_rank_is_an_error_on_all(
    shape: tuple[int, ...], dtype: torch.dtype, text: str
) -> None:
    layer = hvd.SyncBatchNorm(C)
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match=text):
            layer(torch.ones(shape, dtype=dtype))
    else:
        with pytest.raises(hvd.HorovodInternalError, match=text):
            layer(torch.ones(2, C))
    layer(torch.ones(2, C))


class Model(torch.nn.Module):
    """Two layers of one width, one of them used twice, and a second model's layer."""

    def __init__(self, norm: Any, other: torch.nn.Module, recompute: bool) -> None:
        super().__init__()
        self.first, self.second, self.other = norm(C), norm(C), other
        self.mix = torch.nn.Linear(C, C).double()
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.mix(x)).tanh()
        if self.recompute:
            x = checkpoint(lambda y: self.second(self.mix(y)), x, use_reentrant=False)
        else:
            x = self.second(self.mix(x))
        return self.other(self.first(x) + self.second(x))


@pytest.mark.np(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (0, 6)], ids=str)
def test_training_equals_training_on_the_joined_batch(
    recompute: bool, sizes: tuple[int, ...]
) -> None:
    """Per-rank mean losses, weighted if batches are uneven: as one process with all rows."""
    torch.manual_seed(1)
    plain = Model(torch.nn.BatchNorm1d, torch.nn.BatchNorm1d(C), recompute).double()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert not any(type(layer) is torch.nn.BatchNorm1d for layer in model.modules())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(5):
        theirs = batches(list(sizes), (), torch.float64, step)
        optimizer.zero_grad(), reference.zero_grad()
        optimizer.weight = None if len(set(sizes)) == 1 else sizes[hvd.rank()]
        (model(theirs[hvd.rank()]) - 1).pow(4).mean().backward()
        (plain(torch.cat(theirs)) - 1).pow(4).mean().backward()
        optimizer.step(), reference.step()
    for (name, ours), expected in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.np(2)
def test_it_is_differentiable_twice() -> None:
    layer, plain = layers(2)
    layer.double()
    theirs = batches([3, 5], (), torch.float64)
    seconds = []
    for module, batch in ((layer, theirs[hvd.rank()]), (plain, torch.cat(theirs))):
        x = batch.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        first.square().sum().backward()
        seconds.append(x.grad)
    near(seconds[0], seconds[1].split([3, 5])[hvd.rank()], 1e-11)


@pytest.mark.np(3)
def test_a_process_set_joins_its_members_only() -> None:
    some = hvd.add_process_set([0, 2])
    try:
        layer = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(C), some)
        theirs = batches([3, 0, 2], (), torch.float32)
        if some.included():
            copied = copy.deepcopy(layer)
            assert copied.process_set is some
            output = copied(theirs[hvd.rank()].float())
            near(
                output,
                torch.nn.BatchNorm1d(C).double()(torch.cat(theirs)).split([3, 0, 2])[hvd.rank()],
                1e-6,
            )
    finally:
        hvd.remove_process_set(some)


@pytest.mark.np(2)
def test_a_compiled_model_trains_alike() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(C, C), hvd.SyncBatchNorm(C), torch.nn.Tanh())
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    for step in range(2):
        batch = batches([3, 5], (), torch.float32, step)[hvd.rank()].float()
        for module in (model, compiled):
            module(batch).square().sum().backward()
    for ours, expected in zip(compiled.parameters(), model.parameters(), strict=True):
        near(ours.grad, expected.grad, 1e-5)


def test_conversion_takes_over_what_there_is() -> None:
    norm = torch.nn.BatchNorm2d(C, eps=0.1, momentum=0.3)
    norm.eval()
    model = torch.nn.ModuleDict(
        {
            "a": norm,
            "b": torch.nn.Sequential(norm, torch.nn.ReLU(), norm),
            "c": torch.nn.Linear(2, 2),
        }
    )
    state = list(model.state_dict())
    converted: Any = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    layer = model["a"]
    assert type(layer) is hvd.SyncBatchNorm
    assert isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
    assert model["b"][0] is layer
    assert model["b"][2] is layer
    assert layer.weight is norm.weight
    assert layer.running_var is norm.running_var
    assert (layer.eps, layer.momentum, layer.training) == (0.1, 0.3, False)
    assert list(model.state_dict()) == state
    assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(norm)) is hvd.SyncBatchNorm
    with pytest.raises(ValueError, match="lazy"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())
    bare: Any = hvd.SyncBatchNorm.convert_sync_batchnorm(
        torch.nn.BatchNorm1d(C, affine=False, track_running_stats=False)
    )
    assert list(bare.state_dict()) == []


def test_the_constructor_and_copies() -> None:
    signature = str(inspect.signature(hvd.SyncBatchNorm))
    assert "num_features: 'int', eps: 'float' = 1e-05, momentum: 'float | None' = 0.1" in signature
    layer = hvd.SyncBatchNorm(C)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.process_set is hvd.global_process_set
