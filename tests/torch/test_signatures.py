"""The public surface is the table in signatures.py."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

import horovod.torch as hvd
from horovod.torch import compression, functions, mpi_ops, optimizer

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
    assert not table.NOT_YET & set(dir(hvd))
    for name, value in table.OTHERS.items():
        assert value is None or getattr(hvd, name) == value


def test_every_public_function_is_documented() -> None:
    for name in table.SIGNATURES:
        doc = inspect.getdoc(getattr(hvd, name)) or ""
        assert doc or name == "_check_has_gpu", name


def test_modules_that_scripts_import() -> None:
    for name in set(hvd.__all__) & set(mpi_ops.__all__):
        assert getattr(mpi_ops, name) is getattr(hvd, name)
    assert mpi_ops.handle_average_backwards_compatibility(None, None) == hvd.Average
    assert callable(mpi_ops.is_homogeneous)
    assert functions.broadcast_object is hvd.broadcast_object
    assert optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    for name in ("Compressor", "NoneCompressor", "FP16Compressor", "Compression"):
        assert inspect.isclass(getattr(compression, name))
    assert issubclass(compression.FP16Compressor, compression.Compressor)
