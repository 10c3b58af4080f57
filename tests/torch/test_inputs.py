"""What users pass and do besides the plain cases: it works, or is an error in words."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

import horovod.torch as hvd
from horovod.common import ops
from horovod.common.ops import Call

LARGE = pytest.mark.skipif(
    "HOROVOD_TEST_LARGE" not in os.environ, reason="needs 10 GB: HOROVOD_TEST_LARGE=1 runs it"
)


def same(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(actual, wanted), (actual, wanted)


@pytest.mark.np(2)
def test_names_may_hold_anything() -> None:
    names = [
        *("a.b.c", "with spaces and\ttabs\n", 'quotes " and \\', "Grüße, 世界, 🦀", "%s {} {0}"),
        *("", " ", ".", "noname.1", "0", "\x00", "x" * 10_000),
    ]
    for _ in range(2):
        handles = [
            hvd.allreduce_async(torch.full((3,), i), name=name) for i, name in enumerate(names)
        ]
        for i, handle in enumerate(handles):
            same(hvd.synchronize(handle), torch.full((3,), i))
    with pytest.raises(ValueError, match="no valid text"):
        hvd.allreduce(torch.ones(1), name="\ud800")
    for number in (7, np.int64(7)):
        same(hvd.allreduce(torch.ones(1), name=number), torch.ones(1))
    # What the core can't read is sent under the same name.
    tensor = torch.ones(2) if hvd.rank() == 0 else torch.ones(4)[::2]
    same(hvd.synchronize(hvd.allreduce_async_(tensor, name=Title("x"))), torch.ones(2))
    # And under that of what compares equal to it.
    name = Title("y") if hvd.rank() == 0 else "y"
    same(hvd.synchronize(hvd.allreduce_async_(tensor, name=name)), torch.ones(2))


class Title(str):
    """As members of ``class Title(str, Enum)``: its str() isn't the text that it holds."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return f"a title, {str(self)!r}"


@pytest.mark.np(2)
def test_numbers_of_other_kinds() -> None:
    r = hvd.rank()
    mine = torch.arange(4.0) + 10 * r
    for root in (1, np.int64(1), np.uint8(1), torch.tensor(1), True):
        same(hvd.broadcast(mine, root), torch.arange(4.0) + 10)
    wanted = torch.cat([torch.arange(4.0)[2 * r :][:2], torch.arange(4.0)[2 * r :][:2] + 10])
    for splits in (
        *([2, 2], (2, 2), np.array([2, 2]), [np.int64(2), np.int32(2)], torch.Size([2, 2])),
        *([torch.tensor(2), 2], (n for n in (2, 2)), [2.0, 2.0]),
        torch.tensor([2, 2], dtype=torch.int32),
        torch.tensor([2, 0, 2, 0], dtype=torch.int32)[::2],
    ):
        output, received = hvd.alltoall(mine, splits)
        same(output, wanted)
        same(received, torch.tensor([2, 2], dtype=torch.int32))
    for op in (hvd.Sum, 1, np.int64(1)):
        same(hvd.allreduce(torch.ones(2), op=op), torch.full((2,), 2.0))
    for factor in (2, np.float32(2), np.int64(2), torch.tensor(2.0)):
        same(hvd.allreduce(torch.ones(2), prescale_factor=factor), torch.full((2,), 2.0))
    for tensors in ((mine,), [mine], {0: mine}.values(), (t for t in [mine]), iter([mine])):
        same(hvd.grouped_allreduce(tensors)[0], torch.arange(4.0) + 5)


class Tagged(torch.Tensor):
    """A subclass without a dispatch of its own."""


@pytest.mark.np(2)
def test_tensors_of_other_kinds() -> None:
    r = hvd.rank()
    ones = torch.ones(2, 3)
    tagged = (ones * r).as_subclass(Tagged)
    same(hvd.allreduce(tagged, op=hvd.Sum).as_subclass(torch.Tensor), ones)
    assert hvd.allreduce_(tagged, op=hvd.Sum) is tagged
    same(tagged.as_subclass(torch.Tensor), ones)
    same(hvd.allgather(torch.nn.Parameter(ones * r)).detach(), torch.cat([ones * 0, ones]))

    # In place, a value between a leaf and a loss: as with any in-place operation of torch.
    leaf = torch.ones(3, requires_grad=True)
    middle = leaf * (r + 1.0)
    assert hvd.allreduce_(middle, op=hvd.Sum) is middle
    same(middle.detach(), torch.full((3,), 3.0))
    base = torch.zeros(10)
    hvd.allreduce_(base[2:5].fill_(r), op=hvd.Sum)
    hvd.broadcast_(base[7:].fill_(r), 1)
    hvd.grouped_allreduce_([base[0:1].fill_(1), base[5:6].fill_(2)], op=hvd.Sum)
    same(base, torch.tensor([2.0, 0, 1, 1, 1, 4, 0, 1, 1, 1]))
    gaps = torch.zeros(12).as_strided((2, 3), (1, 4))  # not dense, yet without overlap
    gaps.fill_(r)
    hvd.allreduce_(gaps, op=hvd.Sum)
    same(gaps.contiguous(), ones)
    for overlapping in (torch.zeros(1).expand(4), torch.zeros(6).unfold(0, 3, 1)):
        for call in (hvd.allreduce_, hvd.allreduce_async_, lambda t: hvd.broadcast_(t, 0)):
            with pytest.raises(ValueError, match="overlapping"):
                call(overlapping)
    mapped = torch.from_numpy(np.arange(3.0) * r)
    hvd.allreduce_(mapped, op=hvd.Sum)
    same(mapped, torch.arange(3.0, dtype=torch.float64))


KINDS = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "parameter": lambda: torch.nn.Parameter(torch.arange(6.0)),
    "0-d": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
    "offset": lambda: torch.arange(9, dtype=torch.int16)[3:],
    "dims of 1": lambda: torch.arange(6.0).reshape(6, 1).t(),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "strided": lambda: torch.arange(9.0)[::2],
    "complex": lambda: torch.arange(4.0).to(torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.arange(4.0)),
    "subclass": lambda: torch.arange(4.0).as_subclass(Tagged),
    **{
        str(dtype): lambda dtype=dtype: torch.arange(5).to(dtype)
        for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64)
    },
}


@contextlib.contextmanager
def staging_all() -> Iterator[None]:
    """As with a version of torch whose tensors the core can't read."""
    with (
        mock.patch.object(ops, "start", return_value=None),
        mock.patch.object(Call, "start", return_value=None),
    ):
        yield


READ_BY_THE_CORE = {"plain", "parameter", "0-d", "empty", "offset", "dims of 1"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.np(2)
def test_both_ways_to_a_view_lead_to_the_same(kind: str) -> None:
    """What the core reads of a tensor itself, and what older versions of torch tell."""
    readable = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    direct = readable and (kind in READ_BY_THE_CORE or kind.startswith("torch."))
    spy = mock.patch.object(Call, "submit", autospec=True, side_effect=Call.submit)
    results = []
    for way in (contextlib.nullcontext(), staging_all()):
        with way, spy as staged:
            tensor = KINDS[kind]()
            version = tensor._version
            new = hvd.allreduce(tensor.detach(), op=hvd.Sum)
            gathered = hvd.allgather(tensor.detach().reshape(-1))
            assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
            assert tensor._version > version
            same(new, tensor.detach())
            same(gathered, torch.cat([KINDS[kind]().detach().reshape(-1).resolve_neg()] * 2))
            results.append(new)
            assert staged.called != direct
            direct = False
    same(*results)


@pytest.mark.np(2)
def test_what_cannot_be_a_view_is_an_error_either_way() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    cases = {
        "to_dense": torch.ones(2, 2).to_sparse(),
        "dequantize": quantized,
        "to_padded_tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "not supported": torch.ones(2, device="meta"),
        "data type": torch.ones(2).to(torch.float8_e5m2),
    }
    for way in (contextlib.nullcontext(), staging_all()):
        with way:
            for text, tensor in cases.items():
                with pytest.raises(ValueError, match=text):
                    hvd.allreduce_(tensor, name="x")


@pytest.mark.np(2)
def test_one_tensor_in_two_calls_and_gone_before_the_end() -> None:
    r = hvd.rank()
    shared = torch.full((50_000,), float(r + 1))
    handles = [
        hvd.allreduce_async(shared, op=hvd.Sum),
        hvd.allreduce_async(shared, op=hvd.Max),
        hvd.allgather_async(shared[:1]),
        hvd.broadcast_async(shared, 1),
    ]
    del shared
    gc.collect()
    total, most, both, sent = map(hvd.synchronize, handles)
    assert (total == 3).all() and (most == 2).all() and (sent == 2).all()
    assert both.tolist() == [1.0, 2.0]
    results = []
    handle = hvd.allreduce_async_(torch.ones(5), op=hvd.Sum)
    thread = threading.Thread(target=lambda: results.append(hvd.synchronize(handle)))
    thread.start()
    thread.join()
    same(results[0], torch.full((5,), 2.0))


@pytest.mark.np(2)
def test_a_thousand_handles_some_never_synchronized() -> None:
    handles = [hvd.allreduce_async(torch.full((4,), i), name=f"of many.{i}") for i in range(1000)]
    assert len(set(handles)) == 1000
    for i in range(0, 1000, 2):
        same(hvd.synchronize(handles[i]), torch.full((4,), i))
    deadline = time.monotonic() + 5
    while not all(hvd.poll(handle) for handle in handles[1::2]):
        assert time.monotonic() < deadline
    # A name is free once its call is done, whether or not its handle was synchronized.
    same(hvd.allreduce(torch.ones(2), name="of many.1"), torch.ones(2))


@LARGE
@pytest.mark.np(2)
def test_more_than_2_to_the_31_elements_reduced_and_broadcast() -> None:
    count = 2**31 + 9
    tensor = torch.full((count,), hvd.rank() + 1, dtype=torch.uint8)
    tensor[-1] += 10
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert [tensor[i].item() for i in (0, count // 2, -2, -1)] == [3, 3, 3, 23]
    tensor.fill_(hvd.rank())
    hvd.broadcast_(tensor, 1)
    assert [tensor[i].item() for i in (0, count // 2, -1)] == [1, 1, 1]


@LARGE
@pytest.mark.np(2)
def test_more_than_2_to_the_31_elements_gathered_from_fewer() -> None:
    rows = 2**30 + 7
    result = hvd.allgather(torch.full((rows,), hvd.rank(), dtype=torch.uint8))
    assert len(result) == 2 * rows
    assert [result[i].item() for i in (0, rows - 1, rows, -1)] == [0, 0, 1, 1]
