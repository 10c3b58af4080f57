"""The public surface is the table in signatures.py."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd
from horovod import __version__
from horovod.torch import compression, functions, mpi_ops, optimizer, sync_batch_norm

_spec = importlib.util.spec_from_file_location(
    "torch_signatures", Path(__file__).with_name("signatures.py")
)
assert _spec is not None and _spec.loader is not None
table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)

WORDS = {id(hvd.global_process_set): "G", id(hvd.Compression.none): "C", id(hvd.Average): "A"}


def signature(name: str) -> str:
    parts = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        default = parameter.default
        if default is parameter.empty:
            parts.append(parameter.name)
        else:
            parts.append(f"{parameter.name}={WORDS.get(id(default), repr(default))}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", table.SIGNATURES)
def test_signature(name: str) -> None:
    assert signature(name) == table.SIGNATURES[name]


def test_the_namespace_holds_nothing_else() -> None:
    assert set(hvd.__all__) | {"_check_has_gpu"} == set(table.SIGNATURES) | set(table.OTHERS)
    for name, value in table.OTHERS.items():
        assert value is None or getattr(hvd, name) == value


def test_every_public_function_is_documented() -> None:
    for name in table.SIGNATURES:
        doc = inspect.getdoc(getattr(hvd, name)) or ""
        assert doc or name == "_check_has_gpu", name


@pytest.mark.parametrize("module", table.MODULES)
def test_modules_that_programs_import(module: str) -> None:
    found = importlib.import_module(module)
    missing = [name for name in table.MODULES[module].split() if not hasattr(found, name)]
    assert not missing


def test_names_mean_the_same_in_every_module() -> None:
    for module in (mpi_ops, functions, optimizer, compression, sync_batch_norm):
        for name in set(hvd.__all__) & set(dir(module)):
            assert getattr(module, name) is getattr(hvd, name)
    assert set(table.SIGNATURES) - set(dir(mpi_ops)) == set(table.ELSEWHERE.split())
    assert mpi_ops.handle_average_backwards_compatibility(None, None) == hvd.Average
    assert issubclass(compression.FP16Compressor, compression.Compressor)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", __version__)


def test_the_object_that_test_programs_ask() -> None:
    for name in table.BASICS.split():
        answer = getattr(mpi_ops._basics, name)
        assert name.startswith("_") or answer == getattr(hvd, name)


@pytest.mark.np(2)
def test_what_is_registered_and_in_flight() -> None:
    ids = mpi_ops._basics._get_process_set_ids_and_ranks
    before = ids()
    assert before[0] == [0, 1]
    own = hvd.add_process_set([1])
    assert ids() == {**before, own.process_set_id: [1]}
    hvd.remove_process_set(own)
    assert ids() == before
    handle = hvd.allreduce_async(torch.ones(2), name="looked at")
    assert handle in mpi_ops._handle_map
    hvd.synchronize(handle)
    assert handle not in mpi_ops._handle_map


@pytest.mark.parametrize("name", table.NOT_YET)
def test_what_is_listed_as_missing_is_missing(name: str) -> None:
    print(f"{name} is missing: {table.NOT_YET[name]}")
    module, _, attribute = name.rpartition(".")
    assert not hasattr(importlib.import_module(module), attribute)
    with pytest.raises(ImportError):
        importlib.import_module(name)
