"""DistributedOptimizer: state and options survive wrapping, loading, copying and pickling."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from reference import close, data, loss_of, net, same_on_all, train, wrap


def two_groups(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}])


def loaded(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    """A fresh optimizer, with a checkpoint of one that took two steps."""
    optimizer = two_groups(kind, model)
    train(optimizer, model, [0], windows=[1, 1])
    fresh = kind([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh.zero_grad()
    return fresh


def same_state(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same_state(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same_state(x, y)
    else:
        assert a == b


def trains_on(optimizer: Any, model: Any, alone: Any, plain: Any) -> None:
    """Asserts that both go on alike."""
    start = copy.deepcopy(model)
    train(optimizer, model, [hvd.rank()])
    train(plain, alone, range(hvd.size()))
    close(model, alone, start)
    same_on_all(model)


KINDS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.np(1, 2)
def test_wrapping_keeps_state_defaults_and_groups(kind: str) -> None:
    make = KINDS[kind]
    model, alone = net(), net()
    inner, plain = loaded(make, model), loaded(make, alone)
    state = copy.deepcopy(inner.state_dict())
    optimizer = hvd.DistributedOptimizer(inner)
    same_state(optimizer.state_dict(), state)
    assert state["state"]
    assert optimizer.defaults == plain.defaults
    assert [group["lr"] for group in optimizer.param_groups][1] == 0.05
    trains_on(optimizer, model, alone, plain)
    # and loading after wrapping
    for each in (optimizer, plain):
        each.load_state_dict(copy.deepcopy(state))
    same_state(optimizer.state_dict(), state)
    trains_on(optimizer, model, alone, plain)


@pytest.mark.np(2)
def test_loading_state_with_gradients_in_flight() -> None:
    model, alone = net(), net()
    optimizer = wrap(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    state = copy.deepcopy(optimizer.state_dict())
    # Not the whole model, and on each rank another part.
    part, width = (model[0], 4) if hvd.rank() else (model[2], 8)
    part(torch.ones(2, width).double()).sum().backward()
    optimizer.load_state_dict(state)
    trains_on(optimizer, model, alone, plain)


@pytest.mark.np(2)
def test_a_saved_state_loads_into_a_plain_optimizer_and_back() -> None:
    model, alone = net(), net()
    optimizer = hvd.DistributedOptimizer(two_groups(torch.optim.AdamW, model))
    train(optimizer, model, [hvd.rank()])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)  # nothing in it is ours
    plain = two_groups(torch.optim.AdamW, alone)
    plain.load_state_dict(copy.deepcopy(read["optimizer"]))
    alone.load_state_dict(read["model"])
    same_state(plain.state_dict(), optimizer.state_dict())
    trains_on(optimizer, model, alone, plain)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    same_state(plain.state_dict(), optimizer.state_dict())
    trains_on(optimizer, model, alone, plain)


def with_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def with_torch(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": with_pickle,
    "torch.save": with_torch,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no names": {"named_parameters": None},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "fp16": {"compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.np(2)
def test_a_copy_with_the_model_is_a_distributed_optimizer(way: str, options: str) -> None:
    model = net()
    optimizer = wrap(model, torch.optim.Adam(model.parameters()), **OPTIONS[options])
    train(optimizer, model, [hvd.rank()])
    optimizer.zero_grad()
    twin, twins = COPIES[way]((model, optimizer))
    assert isinstance(twins, torch.optim.Adam) and type(twins).__name__ == "Adam"
    assert twins.backward_passes_per_step == optimizer.backward_passes_per_step
    assert twins.op == hvd.Average and twins.process_set is hvd.global_process_set
    assert list(twins._parameter_names.values()) == list(optimizer._parameter_names.values())
    assert set(twins._allreduce_delay) == set(twin.parameters())
    same_state(twins.state_dict(), optimizer.state_dict())
    # Both train, one after the other and at once.
    train(twins, twin, [hvd.rank()])
    train(optimizer, model, [hvd.rank()])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    twins.zero_grad()
    optimizer.zero_grad()
    (loss_of(model, data(hvd.rank())) + loss_of(twin, data(hvd.rank()))).backward()
    twins.step()
    optimizer.step()
    same_on_all(twin)
    same_on_all(model)


@pytest.mark.np(2)
def test_a_copy_alone_reduces_the_parameters_it_has() -> None:
    model = net()
    optimizer = wrap(model, torch.optim.Adam(model.parameters()))
    train(optimizer, model, [hvd.rank()])
    for way in COPIES.values():
        twins = way(optimizer)
        (group,) = twins.param_groups
        twin = net()
        for (name, _), p in zip(list(twin.named_parameters()), group["params"], strict=True):
            module, attribute = name.split(".")
            setattr(twin[int(module)], attribute, p)
        train(twins, twin, [hvd.rank()])
        same_on_all(twin)
    train(optimizer, model, [hvd.rank()])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    same_on_all(model)


@pytest.mark.np(2)
def test_a_copy_of_one_on_a_process_set_reduces_there() -> None:
    alone = hvd.add_process_set([0])
    twin, twins = copy.deepcopy((model := net(), wrap(model, process_set=alone)))
    assert twins.process_set is alone
    train(twins, twin, [hvd.rank()])  # no rank waits for the other
    own = net()
    train(torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9), own, [hvd.rank()])
    close(twin, own, net())
    hvd.remove_process_set(alone)


@pytest.mark.np(2)
def test_it_survives_a_new_engine() -> None:
    model = net()
    optimizer = wrap(model)
    loss_of(model, data(hvd.rank())).backward()
    hvd.shutdown()
    hvd.init()
    handles = [hvd.allreduce_async(torch.ones(1), name=f"{i}") for i in range(4)]
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, model, [hvd.rank()])
    same_on_all(model)
    assert [hvd.synchronize(handle).item() for handle in handles] == [1.0] * 4
