"""Wrong calls: a typed error where they are made and on every rank that waits; then all goes on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import horovod.torch as hvd
from horovod.common.exceptions import MismatchError

LIMIT_S = 5.0


@contextmanager
def soon() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.np(3)
def test_a_call_on_a_set_of_others_is_refused_where_it_is_made() -> None:
    pair = hvd.add_process_set([0, 2])
    for kept in (True, False):
        if not kept:
            assert hvd.remove_process_set(pair)
        for call in (
            lambda: hvd.allreduce(torch.ones(1), process_set=pair),
            lambda: hvd.grouped_allreduce([torch.ones(1)], process_set=pair),
            lambda: hvd.allgather_async(torch.ones(1), process_set=pair),
            lambda: hvd.broadcast_(torch.ones(1), 0, process_set=pair),
            lambda: hvd.alltoall(torch.ones(2), process_set=pair),
            lambda: hvd.reducescatter(torch.ones(2), process_set=pair),
            lambda: hvd.barrier(pair),
        ):
            if hvd.rank() == 1 or not kept:
                with soon(), pytest.raises(ValueError, match=r"not in|not registered"):
                    call()
        usable("sets")


@pytest.mark.np(2)
def test_who_gives_no_process_set_at_all_is_told_of() -> None:
    calls: list[Callable[[Any], object]] = [
        lambda s: hvd.allreduce(torch.ones(1), **s),
        lambda s: hvd.grouped_allreduce([torch.ones(1)], **s),
        lambda s: hvd.allgather(torch.ones(1), **s),
        lambda s: hvd.broadcast(torch.ones(1), 0, **s),
        lambda s: hvd.alltoall(torch.ones(2), **s),
    ]
    for call in calls:
        wrong = {"process_set": 3} if hvd.rank() else {}
        error = TypeError if hvd.rank() else MismatchError
        with soon(), pytest.raises(error, match="process_set must be a ProcessSet, not 3"):
            call(wrong)
        # Calls without a name still match.
        mine = torch.full((1,), float(hvd.rank()))
        assert hvd.allreduce(mine, op=hvd.Sum).item() == 1.0


@pytest.mark.np(2)
def test_nothing_instead_of_a_tensor_is_told_in_words() -> None:
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.reducescatter):
        mine = None if hvd.rank() else torch.ones(2)
        error = TypeError if hvd.rank() else MismatchError
        with soon(), pytest.raises(error, match=r"a torch\.Tensor is needed, not NoneType"):
            call(mine)  # type: ignore[operator]


def usable(name: str) -> None:
    """The next correct calls work, also under the name that failed."""
    for each in (name, f"after {name}"):
        result = hvd.allreduce(torch.ones(3), name=each, op=hvd.Sum)
        assert torch.equal(result, torch.full((3,), float(hvd.size())))


@pytest.mark.np(3)
def test_a_shape_that_differs_names_ranks_and_shapes() -> None:
    for warm in range(3):  # from a cold cache and from a warm one
        for _ in range(warm):
            hvd.allreduce(torch.ones(17, 3), name="shape")
        mine = torch.ones(17, 4 if hvd.rank() == 2 else 3)
        with soon(), pytest.raises(MismatchError) as caught:
            hvd.allreduce(mine, name="shape")
        text = str(caught.value)
        for part in (r'allreduce "shape"', "[17, 3]", "[17, 4]", "rank 2"):
            assert part in text, text
        assert caught.value.op == "allreduce.shape"
        assert "[17, 4]" in str(caught.value.submitted)
        usable("shape")


def disagreements() -> list[tuple[Callable[[int], object], tuple[str, ...]]]:
    """Calls that differ on rank 1, and the values that the error must show."""
    ones = torch.ones(4, 2)
    return [
        (
            lambda r: hvd.allreduce(ones.double() if r == 1 else ones, name="x"),
            ("float32", "float64"),
        ),
        (
            lambda r: hvd.allreduce(ones, name="x", op=hvd.Max if r == 1 else hvd.Sum),
            ("Max", "Sum"),
        ),
        (lambda r: hvd.allreduce(ones, name="x", prescale_factor=1.0 + r % 2), ("1", "2")),
        (lambda r: hvd.allreduce(ones, name="x", postscale_factor=1.0 + r % 2), ("1", "2")),
        (lambda r: hvd.broadcast(ones, r % 2, name="x"), ("0", "1")),
        (lambda r: hvd.broadcast(ones[: 4 - r % 2], 0, name="x"), ("[4, 2]", "[3, 2]")),
        (lambda r: hvd.allgather(ones if r == 1 else ones[:, :1], name="x"), ("2", "1")),
        (lambda r: hvd.allgather(ones.int() if r == 1 else ones, name="x"), ("int32", "float32")),
        (lambda r: hvd.alltoall(ones.flatten() if r == 1 else ones, [1] * 2, name="x"), ()),
        (lambda r: hvd.reducescatter(ones if r == 1 else ones[:2], name="x"), ("[4, 2]", "[2, 2]")),
        (
            lambda r: hvd.grouped_allreduce([ones, ones] if r == 1 else [ones], name="x"),
            ("2", "1"),
        ),
        (
            lambda r: hvd.grouped_allreduce([ones, ones[r:]], name="x"),
            ("tensor 1", "[4, 2]", "[3, 2]"),
        ),
        (
            lambda r: hvd.grouped_allgather([ones, ones[:, r:]], name="x"),
            ("tensor 1", "[2]", "[1]"),
        ),
        (lambda r: hvd.allgather(ones[0] if r == 1 else ones, name="x"), ()),
        (lambda r: hvd.alltoall(ones[:, r:], name="x"), ("[2]", "[1]")),
        *[
            (lambda r, call=call: call(ones.half() if r == 1 else ones), ("float16", "float32"))
            for call in (
                lambda tensor: hvd.allreduce_(tensor, name="x"),
                lambda tensor: hvd.grouped_allreduce_([tensor], name="x"),
                lambda tensor: hvd.broadcast(tensor, 0, name="x"),
                lambda tensor: hvd.broadcast_(tensor, 0, name="x"),
                lambda tensor: hvd.alltoall(tensor, name="x"),
                lambda tensor: hvd.reducescatter(tensor, name="x"),
                lambda tensor: hvd.grouped_reducescatter([tensor], name="x"),
                lambda tensor: hvd.grouped_allgather([tensor], name="x"),
            )
        ],
        (
            lambda r: hvd.reducescatter(ones, name="x", op=hvd.Sum if r == 1 else hvd.Average),
            ("Sum", "Average"),
        ),
        (lambda r: hvd.reducescatter(ones, name="x", prescale_factor=1.0 + r), ("1", "2")),
        (lambda r: hvd.reducescatter(ones, name="x", postscale_factor=1.0 + r), ("1", "2")),
        (lambda r: hvd.grouped_reducescatter([ones, ones[r:]], name="x"), ("[4, 2]", "[3, 2]")),
        (lambda r: hvd.allreduce(torch.ones(()) if r else torch.ones(1), name="x"), ("[]", "[1]")),
        (lambda r: hvd.broadcast(torch.ones(r), 0, name="x"), ("[0]", "[1]")),
    ]


@pytest.mark.np(2)
def test_every_disagreement_is_a_mismatch_on_every_rank() -> None:
    for call, parts in disagreements():
        with soon(), pytest.raises(MismatchError) as caught:
            call(hvd.rank())
        for part in parts:
            assert part in str(caught.value)
        usable("x")


class Refusing(hvd.Compression.none):
    """A user's compressor that can't."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise ValueError("not this tensor")


class Breaking(hvd.Compression.none):
    """A user's compressor with a fault."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise RuntimeError("broken")


def refusals() -> list[tuple[type[Exception], Callable[[str], object]]]:
    """Calls that are wrong by themselves, whatever the others do."""
    ones = torch.ones(4, 2)
    with FakeTensorMode():
        fake = torch.ones(4, 2)
    quantized = torch.quantize_per_tensor(ones, 1.0, 0, torch.qint8)
    int64 = torch.tensor([2, 2])
    return [
        *[
            (ValueError, lambda name, bad=bad: hvd.allreduce_(bad, name=name))
            for bad in (
                ones.to("meta"),
                ones.to_sparse(),
                quantized,
                fake,
                ones.to(torch.float8_e5m2),
                torch.ones(1, 2).expand(4, 2),
            )
        ],
        (TypeError, lambda name: hvd.allreduce([1.0], name=name)),
        (ValueError, lambda name: hvd.allreduce(ones.bool(), name=name, op=hvd.Average)),
        (ValueError, lambda name: hvd.allreduce(ones.cfloat(), name=name, op=hvd.Max)),
        (ValueError, lambda name: hvd.allreduce(ones.int(), name=name, op=hvd.Adasum)),
        (ValueError, lambda name: hvd.allreduce(ones, name=name, op=17)),
        (ValueError, lambda name: hvd.allreduce_(ones, name=name, op=17)),
        (ValueError, lambda name: hvd.allreduce(ones, True, name, op=hvd.Sum)),
        (TypeError, lambda name: hvd.allreduce(ones, "average", name)),
        (ValueError, lambda name: hvd.allreduce(ones, name=name, compression=Refusing)),
        (ValueError, lambda name: hvd.grouped_allreduce([ones], name=name, op=17)),
        (ValueError, lambda name: hvd.grouped_allreduce_([ones], name=name, op=17)),
        (ValueError, lambda name: hvd.grouped_allreduce([ones], name=name, compression=Refusing)),
        (ValueError, lambda name: hvd.reducescatter(ones, name=name, op=17)),
        (ValueError, lambda name: hvd.reducescatter(ones, name=name, compression=Refusing)),
        (ValueError, lambda name: hvd.grouped_reducescatter([ones], name=name, op=17)),
        (ValueError, lambda name: hvd.broadcast(ones, 1 << 40, name=name)),
        (ValueError, lambda name: hvd.alltoall(ones, [1 << 70, 0], name=name)),
        (TypeError, lambda name: hvd.allreduce(ones, name=name, prescale_factor=None)),
        (TypeError, lambda name: hvd.broadcast(ones, None, name=name)),
        (TypeError, lambda name: hvd.broadcast(ones, 0.0, name=name)),
        (TypeError, lambda name: hvd.broadcast(ones, "0", name=name)),
        (ValueError, lambda name: hvd.broadcast_(ones[:1].expand(4, 2), 0, name=name)),
        (ValueError, lambda name: hvd.allreduce_(ones.view(-1).unfold(0, 4, 1), name=name)),
        (ValueError, lambda name: hvd.allreduce(ones.bool(), name=name, prescale_factor=2.0)),
        (ValueError, lambda name: hvd.grouped_allreduce([], name=name)),
        (TypeError, lambda name: hvd.grouped_allreduce(None, name=name)),
        (TypeError, lambda name: hvd.grouped_allreduce_(3, name=name)),
        (ValueError, lambda name: hvd.grouped_reducescatter([], name=name)),
        # The rows of a tensor would make a group.
        (TypeError, lambda name: hvd.grouped_allreduce(ones, name=name)),
        (TypeError, lambda name: hvd.grouped_allreduce_(ones, name=name)),
        (TypeError, lambda name: hvd.grouped_allgather(ones, name=name)),
        (TypeError, lambda name: hvd.grouped_reducescatter(ones, name=name)),
        (TypeError, lambda name: hvd.allreduce(1.0, name=name, compression=hvd.Compression.fp16)),
        (ValueError, lambda name: hvd.broadcast(ones, 2, name=name)),
        (ValueError, lambda name: hvd.broadcast(ones, -1, name=name)),
        (ValueError, lambda name: hvd.allgather(torch.tensor(1.0), name=name)),
        (ValueError, lambda name: hvd.reducescatter(torch.tensor(1.0), name=name)),
        (ValueError, lambda name: hvd.grouped_reducescatter([torch.tensor(1.0)], name=name)),
        (hvd.HorovodInternalError, lambda name: hvd.reducescatter(ones, name=name, op=hvd.Min)),
        *[
            (ValueError, lambda name, splits=splits: hvd.alltoall(ones, splits, name=name))
            for splits in (
                *([1, 1, 1], [1], [], [5, 0], [-1, 2], [3, 2], ["a", 1], ["1", "1"], [0.5, 1.5]),
                *(int64, int64.int()[:, None], int64.float(), 2),
            )
        ],
        (ValueError, lambda name: hvd.alltoall(torch.ones(3), name=name)),
    ]


FORMS: dict[str, list[Callable[[Any, str], object]]] = {
    "allreduce": [
        lambda tensor, name: hvd.allreduce(tensor, name=name),
        lambda tensor, name: hvd.allreduce_(tensor, name=name),
        lambda tensor, name: hvd.allreduce_async(tensor, name=name),
        lambda tensor, name: hvd.allreduce_async_(tensor, name=name),
    ],
    "grouped_allreduce": [
        lambda tensor, name: hvd.grouped_allreduce([torch.ones(4), tensor], name=name),
        lambda tensor, name: hvd.grouped_allreduce_([torch.ones(4), tensor], name=name),
        lambda tensor, name: hvd.grouped_allreduce_async([torch.ones(4), tensor], name=name),
        lambda tensor, name: hvd.grouped_allreduce_async_([torch.ones(4), tensor], name=name),
    ],
    "allgather": [
        lambda tensor, name: hvd.allgather(tensor, name=name),
        lambda tensor, name: hvd.allgather_async(tensor, name=name),
    ],
    "grouped_allgather": [
        lambda tensor, name: hvd.grouped_allgather([torch.ones(4), tensor], name=name),
        lambda tensor, name: hvd.grouped_allgather_async([torch.ones(4), tensor], name=name),
    ],
    "broadcast": [
        lambda tensor, name: hvd.broadcast(tensor, 0, name=name),
        lambda tensor, name: hvd.broadcast_(tensor, 0, name=name),
        lambda tensor, name: hvd.broadcast_async(tensor, 0, name=name),
        lambda tensor, name: hvd.broadcast_async_(tensor, 0, name=name),
    ],
    "alltoall": [
        lambda tensor, name: hvd.alltoall(tensor, name=name),
        lambda tensor, name: hvd.alltoall_async(tensor, [1, 1], name=name),
    ],
    "reducescatter": [
        lambda tensor, name: hvd.reducescatter(tensor, name=name),
        lambda tensor, name: hvd.reducescatter_async(tensor, name=name),
    ],
    "grouped_reducescatter": [
        lambda tensor, name: hvd.grouped_reducescatter([torch.ones(4), tensor], name=name),
        lambda tensor, name: hvd.grouped_reducescatter_async([torch.ones(4), tensor], name=name),
    ],
}


def no_tensors() -> list[object]:
    """What no collective takes."""
    ones = torch.ones(4, 2)
    with FakeTensorMode():
        fake = torch.ones(4, 2)
    return [
        ones.to("meta"),
        ones.to_sparse(),
        torch.quantize_per_tensor(ones, 1.0, 0, torch.qint8),
        fake,
        ones.to(torch.float8_e4m3fn),
        ones.numpy(),
        [1.0, 2.0],
        1.0,
        None,
    ]


@pytest.mark.np(2)
def test_what_no_form_takes_fails_on_the_other_rank_too() -> None:
    for op, forms in FORMS.items():
        for i, form in enumerate(forms):
            for j, wrong in enumerate(no_tensors()):
                name = f"{op}.{i}.{j}"
                if hvd.rank() == 1:
                    with pytest.raises((ValueError, TypeError), match=op):
                        form(wrong, name)
                else:
                    with soon(), pytest.raises(MismatchError, match="rank 1"):
                        result = form(torch.ones(4, 2), name)
                        if isinstance(result, int):
                            hvd.synchronize(result)
            usable(name)


MATCHING: dict[str, Callable[[str], object]] = {
    "allreduce": lambda name: hvd.allreduce(torch.ones(4, 2), name=name),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce([torch.ones(4)], name=name),
    "broadcast": lambda name: hvd.broadcast(torch.ones(4, 2), 0, name=name),
    "allgather": lambda name: hvd.allgather(torch.ones(4, 2), name=name),
    "grouped_allgather": lambda name: hvd.grouped_allgather([torch.ones(4)], name=name),
    "alltoall": lambda name: hvd.alltoall(torch.ones(4, 2), [2, 2], name=name),
    "reducescatter": lambda name: hvd.reducescatter(torch.ones(4, 2), name=name),
    "grouped_reducescatter": lambda name: hvd.grouped_reducescatter([torch.ones(4)], name=name),
}


def called_by(call: Callable[[str], object]) -> str:
    """Which operation a lambda of `refusals` calls."""
    names = [name.rstrip("_") for name in call.__code__.co_names]
    return next(name for name in names if name in MATCHING)


@pytest.mark.np(2)
def test_a_call_that_is_wrong_on_one_rank_fails_on_all() -> None:
    for order in ("first", "last"):  # the wrong call comes before or after the others'
        for i, (kind, wrong) in enumerate(refusals()):
            name = f"{called_by(wrong)}.{i}.{order}"
            if hvd.rank() == 1:
                if order == "last":
                    time.sleep(0.02)
                with pytest.raises(kind) as caught:
                    wrong(name)
                assert name in str(caught.value)
            else:
                if order == "first":
                    time.sleep(0.02)
                with soon(), pytest.raises(MismatchError, match="rank 1"):
                    MATCHING[name.partition(".")[0]](name)
            usable(name)


@pytest.mark.np(2)
def test_an_unnamed_call_that_is_wrong_on_one_rank_keeps_its_place() -> None:
    ones = torch.ones(4)
    for kind, wrong, right in (
        (ValueError, lambda: hvd.allreduce(ones, op=17), hvd.allreduce),
        (RuntimeError, lambda: hvd.allreduce(ones, compression=Breaking), hvd.allreduce),
        (ValueError, lambda: hvd.reducescatter_async(ones, op=17), hvd.reducescatter),
    ):
        with soon(), pytest.raises(kind if hvd.rank() else MismatchError):
            wrong() if hvd.rank() else right(ones)
        assert hvd.allreduce(ones * hvd.rank(), op=hvd.Max).tolist() == [1.0] * 4
        assert hvd.reducescatter(ones, op=hvd.Sum).tolist() == [2.0] * 2


class NoOutputs(TorchFunctionMode):
    """In which they can't be made."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty_like:
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.mark.np(2)
def test_an_output_that_cannot_be_made_is_told() -> None:
    ones = torch.ones(4)
    errors = (RuntimeError, ValueError, KeyError, AssertionError)
    for name, kind in itertools.product(("x", None), errors):
        with (
            soon(),
            pytest.raises(kind if hvd.rank() else MismatchError, match="no memory"),
        ):
            with NoOutputs(kind("no memory")) if hvd.rank() else nullcontext():
                handle = hvd.allreduce_async(ones, name=name)
            hvd.synchronize(handle)
        assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [2.0] * 4


@pytest.mark.np(2)
def test_refusals_on_all_ranks_leave_the_name_free() -> None:
    for i, (kind, wrong) in enumerate(refusals()):
        with soon(), pytest.raises(kind):
            wrong(f"everywhere.{i}")
    usable("everywhere.0")


@pytest.mark.np(3)
def test_a_name_in_flight_is_refused_only_where_it_was_used_twice() -> None:
    ones = torch.ones(6)
    for call in (
        lambda: hvd.allreduce_async(ones, name="twice"),
        lambda: hvd.allgather_async(ones, name="twice"),
        lambda: hvd.broadcast_async(ones, 0, name="twice"),
        lambda: hvd.reducescatter_async(ones, name="twice"),
        lambda: hvd.alltoall_async(ones, name="twice"),
    ):
        for twice in ([0, 1], [0]):
            if hvd.rank() == 2:
                hvd.barrier()  # until then the others' calls are in flight for sure
            handle = call()
            if hvd.rank() in twice:
                with pytest.raises(ValueError, match="in flight"):
                    call()
            if hvd.rank() != 2:
                hvd.barrier()
            with soon():
                assert hvd.synchronize(handle) is not None
            usable("twice")


@pytest.mark.np(1)
def test_before_init_and_after_shutdown() -> None:
    hvd.shutdown()
    try:
        for call in (
            lambda: hvd.allreduce(torch.ones(1)),
            lambda: hvd.barrier(),
            hvd.join,
            lambda: hvd.broadcast_object(1),
        ):
            with pytest.raises(hvd.HorovodInternalError, match="init"):
                call()
        with pytest.raises(ValueError, match="init"):
            hvd.rank()
        plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(ValueError, match="init"):
            hvd.DistributedOptimizer(plain)  # it would train alone
        assert hvd.synchronize(12345) is None
    finally:
        hvd.init()
    assert hvd.allreduce(torch.ones(1)).item() == 1.0
