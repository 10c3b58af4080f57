"""DistributedOptimizer: which calls it makes and when, what it refuses, what it keeps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.common import basics


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def data(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :2].sin()).square().mean()


def wrap(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(optimizer, **options)


def same_on_all(model: nn.Module) -> None:
    mine = model.state_dict()
    for state in hvd.allgather_object(mine):
        for key, value in state.items():
            assert torch.equal(value, mine[key]), key


def close(model: nn.Module, reference: nn.Module) -> None:
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def tensors_sent() -> int:
    return int(basics.engine().counters()["calls"])


@pytest.mark.np(1, 2)
def test_the_class_is_the_wrapped_ones() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.note = "kept"
    wrapped = wrap(model, optimizer)
    assert isinstance(wrapped, torch.optim.SGD)
    assert type(wrapped).__name__ == "SGD"
    assert wrapped.__module__ == "horovod.torch.optimizer"
    assert wrapped.param_groups is optimizer.param_groups
    assert wrapped.note == "kept"
    assert wrapped.backward_passes_per_step == 1 and wrapped.op == hvd.Average
    assert wrapped.process_set is hvd.global_process_set
    assert set(wrapped._parameter_names.values()) == {n for n, _ in model.named_parameters()}
    assert wrapped._handles == {}
    if hvd.size() > 1:
        assert wrapped._requires_update == set(model.parameters())
        assert set(wrapped._allreduce_delay.values()) == {1}


@pytest.mark.np(1, 2)
def test_arguments_are_checked() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        ("at least 1", {"backward_passes_per_step": 0}),
        ("at least 1", {"backward_passes_per_step": -1}),
        ("groups", {"groups": 0}),
        ("groups", {"groups": [["0.weight"]]}),
        ("twice", {"groups": [[named[0][1]], [named[0][1]]]}),
        ("of the name 0.weight", {"named_parameters": [*named, named[0]]}),
        ("of the name 0.weight", {"named_parameters": [(named[0][0], p) for _, p in named]}),
        ("lacks 1", {"named_parameters": named[1:]}),
        ("named_parameters", {"named_parameters": [p for _, p in named]}),
    ]
    for text, options in wrong:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd, **options)
    with pytest.warns(DeprecationWarning, match="num_groups"), pytest.raises(ValueError):
        hvd.DistributedOptimizer(sgd, num_groups=-1)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd))


@pytest.mark.np(2)
def test_names_without_names_are_unique_over_groups() -> None:
    a, b = net(), net(1)
    groups = [{"params": list(a.parameters())}, {"params": list(b.parameters()), "lr": 0.3}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    assert sorted(optimizer._parameter_names.values()) == [
        f"allreduce.noname.{g}.{p}" for g in range(2) for p in range(4)
    ]
    for step in range(2):
        optimizer.zero_grad()
        (loss_of(a, data(hvd.rank(), step)) + loss_of(b, data(hvd.rank(), step))).backward()
        optimizer.step()
    same_on_all(a)
    same_on_all(b)


@pytest.mark.np(2)
def test_reductions_start_while_backward_runs() -> None:
    started: list[int] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            started.append(len(optimizer._handles))
            return grad

    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    optimizer = wrap(layers)
    x = torch.ones(2, 4)
    for layer in layers:
        x = layer(Watch.apply(x) if x.requires_grad else x)
    x.sum().backward()
    assert started == [2, 4]
    assert optimizer._handles == {}  # the end of backward waited
    optimizer.step()


@pytest.mark.np(2)
def test_each_parameter_is_reduced_once_per_window() -> None:
    model = net()
    optimizer = wrap(model, backward_passes_per_step=4)
    for window in range(2):
        before = tensors_sent()
        for step in range(4):
            loss_of(model, data(hvd.rank(), step)).backward()
            assert tensors_sent() - before == (0 if step < 3 else 5 if window == 0 else 4)
        optimizer.step()
        optimizer.zero_grad()
        # in the first window ranks tell each other which gradients there are
        assert tensors_sent() - before == (5 if window == 0 else 4)


def train_in_windows(windows: list[int], ranks: Iterable[int], optimizer: Any, model: Any) -> None:
    """Micro-batches of several ranks, each window one step on the mean over ranks of their sums."""
    step = 0
    ranks = list(ranks)
    for window in windows:
        optimizer.zero_grad()
        for _ in range(window):
            for rank in ranks:
                (loss_of(model, data(rank, step)) / len(ranks)).backward()
            step += 1
        optimizer.step()


@pytest.mark.np(2)
def test_a_short_last_window_is_reduced_as_it_is() -> None:
    windows = [4, 4, 2] * 2  # two epochs of ten
    reference, model = net(), net()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_in_windows(windows, range(2), sgd, reference)
    optimizer = wrap(model, backward_passes_per_step=4)
    train_in_windows(windows, [hvd.rank()], optimizer, model)
    close(model, reference)
    same_on_all(model)
    # a step after every micro-batch trains as well
    train_in_windows([1] * 5, range(2), sgd, reference)
    train_in_windows([1] * 5, [hvd.rank()], optimizer, model)
    close(model, reference)
    optimizer.set_backward_passes_per_step(2)
    train_in_windows([2] * 3, range(2), sgd, reference)
    train_in_windows([2] * 3, [hvd.rank()], optimizer, model)
    close(model, reference)


@pytest.mark.np(2)
def test_a_pass_too_many() -> None:
    model = net()
    optimizer = wrap(model, op=hvd.Sum)
    loss_of(model, data(hvd.rank())).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(model, data(hvd.rank())).backward()
    optimizer.step()
    for to_none in (False, True):
        optimizer.zero_grad(set_to_none=to_none)
        assert (next(model.parameters()).grad is None) is to_none
    with pytest.raises(AssertionError, match="create_graph"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model, data(0)).backward(create_graph=True)
    optimizer.step()


@pytest.mark.np(2)
def test_means_can_be_added_to_and_reduced_again() -> None:
    reference, model = net(), net()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(model)
    for step in range(2):
        for passes in range(2):
            for rank in range(2):
                (loss_of(reference, data(rank, 2 * step + passes)) / 2).backward()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                loss_of(model, data(hvd.rank(), 2 * step + passes)).backward()
            assert len(warned) == (step == 0 and passes == 1)
        sgd.step()
        optimizer.step()
        sgd.zero_grad()
        optimizer.zero_grad()
    close(model, reference)


@pytest.mark.np(2)
def test_zero_grad_is_refused_while_gradients_are_in_flight() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = wrap(model)
    model["a"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    assert optimizer._handles
    model["b"](torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()  # nothing is in flight: the gradients are dropped on every rank
    assert model["a"].weight.grad is None


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


@pytest.mark.np(2)
def test_synchronize_clip_and_step() -> None:
    model, reference = net(), net()
    optimizer = wrap(model)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, data(hvd.rank(), step)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
        sgd.zero_grad()
        (sum(loss_of(reference, data(rank, step)) for rank in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        sgd.step()
    close(model, reference)
    loss_of(model, data(hvd.rank())).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(caught) == 1
    text = "optimizer.step() called without optimizer.skip_synchronize()"
    assert text in str(caught[0].message)
    same_on_all(model)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = (nn.Linear(4, 2).double() for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.b(x) if branch else self.a(x)


@pytest.mark.np(2)
def test_parameters_that_only_some_ranks_use_count_as_zero() -> None:
    model, reference = Branches(), Branches()
    model.unused.weight.requires_grad_(False)
    optimizer = wrap(model)
    model.unused.bias.requires_grad_(False)  # frozen after it was wrapped
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(data(hvd.rank(), step), hvd.rank()).square().sum().backward()
        optimizer.step()
        assert model.unused.weight.grad is None
        assert model.unused.bias.grad is None
        sgd.zero_grad()
        (sum(reference(data(k, step), k).square().sum() for k in range(2)) / 2).backward()
        sgd.step()
    close(model.a, reference.a)
    close(model.b, reference.b)
    same_on_all(model)
    model.unused.requires_grad_(True)  # and thawed on all ranks
    optimizer.zero_grad()
    model.unused(data(hvd.rank())).sum().backward()
    optimizer.step()
    same_on_all(model)
    assert model.unused.weight.grad is not None


@pytest.mark.np(2)
def test_two_models_with_equal_names() -> None:
    for named in (True, False):
        g, d = net(0), net(1)
        options = {} if named else {"named_parameters": None}
        g_optimizer, d_optimizer = wrap(g, **options), wrap(d, **options)
        references = net(0), net(1)
        plain = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in references]

        def losses(g: Any, d: Any, ranks: list[int], step: int) -> Any:
            terms = [
                (loss_of(d, torch.cat([g(data(k, step))] * 2, 1)), loss_of(g, data(k, step)))
                for k in ranks
            ]
            return [sum(each) / len(ranks) for each in zip(*terms, strict=True)]

        def train(
            g: Any,
            d: Any,
            g_optimizer: Any,
            d_optimizer: Any,
            ranks: list[int],
            losses: Any = losses,
        ) -> None:
            for step in range(3):
                # One backward pass reaches both models before either steps.
                d_loss, g_loss = losses(g, d, ranks, step)
                (d_loss + g_loss).backward()
                d_optimizer.step()
                g_optimizer.step()
                d_optimizer.zero_grad()
                g_optimizer.zero_grad()

        train(g, d, g_optimizer, d_optimizer, [hvd.rank()])
        train(*references, *plain, [0, 1])
        close(g, references[0])
        close(d, references[1])
        same_on_all(g)
        same_on_all(d)


@pytest.mark.np(2)
def test_a_second_wrapper_takes_the_parameters_over() -> None:
    model = net()
    first = wrap(model)
    loss_of(model, data(hvd.rank())).backward()  # in flight when it loses them
    second = wrap(model)
    with pytest.raises(RuntimeError, match="another DistributedOptimizer"):
        first.step()
    second.zero_grad()
    loss_of(model, data(hvd.rank())).backward()
    assert not first._handles and second.reducer.reduced
    second.step()
    same_on_all(model)


@pytest.mark.np(2)
def test_state_is_kept() -> None:
    def loaded(model: nn.Module) -> torch.optim.Adam:
        optimizer = torch.optim.Adam(
            [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
        )
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, data(0, step)).backward()
            optimizer.step()
        fresh = torch.optim.Adam(
            [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        )
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        fresh.zero_grad()
        return fresh

    model, reference = net(), net()
    plain = loaded(reference)
    optimizer = hvd.DistributedOptimizer(loaded(model))
    assert optimizer.state_dict()["state"][0]["step"] == 2
    assert optimizer.defaults == plain.defaults
    for step in range(3):
        train_in_windows([1], [0, 1], plain, reference)
        train_in_windows([1], [hvd.rank()], optimizer, model)
        if step == 1:  # loading again after wrapping
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    close(model, reference)
    same_on_all(model)


@pytest.mark.np(2)
def test_loading_state_with_gradients_in_flight() -> None:
    model = net()
    optimizer = wrap(model)
    state = copy.deepcopy(optimizer.state_dict())
    loss_of(model, data(hvd.rank())).backward()
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    loss_of(model, data(hvd.rank())).backward()
    optimizer.step()
    same_on_all(model)


@pytest.mark.np(2)
def test_it_survives_a_new_engine() -> None:
    model = net()
    optimizer = wrap(model)
    loss_of(model, data(hvd.rank())).backward()
    hvd.shutdown()
    hvd.init()
    handles = [hvd.allreduce_async(torch.ones(1), name=f"{i}") for i in range(4)]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    loss_of(model, data(hvd.rank())).backward()
    optimizer.step()
    same_on_all(model)
    assert [hvd.synchronize(handle).item() for handle in handles] == [1.0] * 4


@pytest.mark.np(2)
def test_a_group_added_later_is_reduced() -> None:
    first, second = net(0), net(1)
    optimizer = wrap(first)
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
    for step in range(2):
        optimizer.zero_grad()
        x = data(hvd.rank(), step)
        (loss_of(first, x) + loss_of(second, x)).backward()
        optimizer.step()
    same_on_all(first)
    same_on_all(second)


@pytest.mark.np(2)
def test_hooks_and_schedules_of_torch_still_work() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    early = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    optimizer = wrap(model, sgd)
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(len(optimizer._handles)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(2):
            optimizer.zero_grad()
            loss_of(model, data(hvd.rank())).backward()
            optimizer.step()
            early.step()
            late.step()
            if i == 0:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert calls == [0, 0]  # once a step, on reduced gradients
    same_on_all(model)


@pytest.mark.np(2)
def test_compression_and_predivision() -> None:
    for options in (
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 2.0},
        {"op": hvd.Sum},
        {"op": hvd.Max},
    ):
        model = net(dtype=torch.float32)
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        copies = [copy.deepcopy(model) for _ in range(2)]
        grads = []
        for rank, each in enumerate(copies):
            (each(data(rank).float()) ** 2).sum().backward()
            grads.append([p.grad for p in each.parameters()])
        (model(data(hvd.rank()).float()) ** 2).sum().backward()
        optimizer.synchronize()
        for p, a, b in zip(model.parameters(), *grads, strict=True):
            wanted = {hvd.Sum: a + b, hvd.Max: torch.maximum(a, b)}.get(optimizer.op, (a + b) / 2)
            rough = 0.02 if "compression" in options else 1e-6
            torch.testing.assert_close(p.grad, wanted, rtol=rough, atol=rough)
        with optimizer.skip_synchronize():
            optimizer.step()
        same_on_all(model)


class Halving:
    """A user's compressor: an object with the two methods."""

    def __init__(self) -> None:
        self.calls = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.calls += 1
        return tensor / 2, None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 2


@pytest.mark.np(2)
def test_a_compressor_of_the_users_own() -> None:
    model = net()
    halving = Halving()
    optimizer = wrap(model, compression=halving)
    train_in_windows([1, 1], [hvd.rank()], optimizer, model)
    assert halving.calls == 8
    same_on_all(model)
    assert hvd.allreduce(torch.ones(2), compression=halving, op=hvd.Sum).tolist() == [2.0, 2.0]


@pytest.mark.np(2)
def test_a_compressor_that_fails_on_one_rank_fails_the_gradient_on_all() -> None:
    class Broken(Halving):
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if hvd.rank() == 1:
                raise RuntimeError("broken")
            return super().compress(tensor)

    model = nn.Linear(2, 1, bias=False)
    optimizer = wrap(model, compression=Broken())
    with pytest.raises(
        hvd.HorovodInternalError if hvd.rank() == 0 else RuntimeError, match="broken"
    ):
        model(torch.ones(2)).sum().backward()
        optimizer.synchronize()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


@pytest.mark.np(2)
def test_closures_see_reduced_gradients_and_the_mean_loss() -> None:
    for make in (
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.LBFGS(ps, max_iter=5),
        lambda ps: torch.optim.LBFGS(ps, max_iter=5, line_search_fn="strong_wolfe"),
    ):
        model, reference = net(), net()

        def run(optimizer: Any, model: nn.Module, ranks: list[int]) -> list[float]:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = sum(loss_of(model, data(rank)) for rank in ranks) / len(ranks)
                loss.backward()
                return loss

            return [float(optimizer.step(closure)) for _ in range(3)]

        losses = run(wrap(model, make(model.parameters())), model, [hvd.rank()])
        wanted = run(make(reference.parameters()), reference, [0, 1])
        assert losses == pytest.approx(wanted, rel=1e-9)
        same_on_all(model)
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.np(3)
def test_outside_its_process_set_it_is_a_plain_optimizer() -> None:
    pair = hvd.add_process_set([0, 2])
    model = net()
    optimizer = wrap(model, process_set=pair)
    loss_of(model, data(hvd.rank())).backward()
    optimizer.step()
    states = hvd.allgather_object(model.state_dict())
    assert torch.equal(states[0]["0.weight"], states[2]["0.weight"])
    assert not torch.equal(states[0]["0.weight"], states[1]["0.weight"])
    hvd.remove_process_set(pair)


@pytest.mark.np(2)
def test_a_gradient_that_differs_in_shape_is_a_mismatch_and_the_rest_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2 + hvd.rank())})
    optimizer = wrap(model)
    with pytest.raises(hvd.HorovodInternalError, match=r"b\.(weight|bias)"):
        (model["a"](torch.ones(1, 2)).sum() + model["b"](torch.ones(1, 2)).sum()).backward()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    optimizer.zero_grad()
    model["a"](torch.ones(1, 2)).sum().backward()
    assert len(optimizer._handles) == 2
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()


@pytest.mark.np(2)
def test_gradients_in_channels_last() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    reference = copy.deepcopy(model)
    if hvd.rank() == 1:
        model = model.to(memory_format=torch.channels_last)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 3, 5, 5) * (hvd.rank() + 1)
    model(x.to(memory_format=torch.channels_last) if hvd.rank() else x).square().sum().backward()
    optimizer.step()
    sum(reference(torch.ones(2, 3, 5, 5) * k).square().sum() / 2 for k in (1, 2)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-4, atol=1e-4)
    same_on_all(model)
