"""The public surface for TensorFlow and Keras is the table in tensorflow_signatures.py."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import tensorflow_signatures as table

pytestmark = pytest.mark.flavour("keras3", "tf_keras")
Run = Callable[..., list[Any]]


def signature(found: Any, words: dict[int, str]) -> str:
    parts = []
    for parameter in inspect.signature(found).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            text += "=" + words.get(id(parameter.default), repr(parameter.default))
        parts.append(text)
    return ", ".join(parts)


def surface(module: str) -> tuple[dict[str, str], list[str], list[str]]:
    """Signatures of the module's names in the table; what isn't documented; its ``__all__``."""
    hvd = importlib.import_module("horovod.tensorflow")
    found = importlib.import_module(module)
    names = [name for name in table.SURFACES[module][0] if hasattr(found, name)]
    words = {id(hvd.global_process_set): "G", id(hvd.Compression.none): "C", id(hvd.Average): "A"}
    signatures = {name: signature(getattr(found, name), words) for name in names}
    bare = [name for name in names if not inspect.getdoc(getattr(found, name))]
    return signatures, bare, list(found.__all__)


@pytest.mark.parametrize("module", table.SURFACES)
def test_surface(run_in: Run, module: str) -> None:
    signatures, others = table.SURFACES[module]
    found, bare, exported = run_in(2, surface, module=module)[0]
    assert found == signatures
    assert not bare
    assert len(exported) == len(set(exported))
    assert set(exported) == {*signatures, *others}


def missing() -> dict[str, list[str]]:
    """What of MODULES isn't there."""
    found = {}
    for module, names in table.MODULES.items():
        there = importlib.import_module(module)
        found[module] = [name for name in names.split() if not hasattr(there, name)]
    return {module: names for module, names in found.items() if names}


def test_names_and_modules_that_programs_reach_for(run_in: Run) -> None:
    assert run_in(2, missing)[0] == {}


@pytest.mark.np(2)
def test_names_mean_the_same_in_every_module() -> None:
    import horovod.keras
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras
    from horovod.common import basics, exceptions, process_sets

    for name in ("init", "rank", "size", "shutdown"):
        assert getattr(hvd, name) is getattr(basics, name)
    assert hvd.global_process_set is process_sets.global_process_set
    assert hvd.HorovodInternalError is exceptions.HorovodInternalError
    shared = set(hvd.__all__) & set(dir(hvd.mpi_ops))
    assert {"allreduce", "alltoall", "size_op", "Average", "init"} <= shared
    for name in shared:
        assert getattr(hvd.mpi_ops, name) is getattr(hvd, name)
    assert hvd.mpi_ops._basics.rank() == hvd.rank()
    for face in (horovod.keras, horovod.tensorflow.keras):
        for name in (*table.BASICS, *table.CONSTANTS, "ProcessSet", "Compression"):
            assert getattr(face, name) is getattr(hvd, name)


@pytest.mark.np(2)
def test_constants_are_those_of_0_28() -> None:
    import horovod.tensorflow as hvd

    assert [int(getattr(hvd, name)) for name in table.CONSTANTS] == [0, 1, 2, 3, 4, 5]


def is_there(name: str) -> bool:
    """Whether a module, or an attribute of one, can be imported."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        return hasattr(importlib.import_module(module), attribute)
    return True


def there_nonetheless() -> list[str]:
    return [name for name in table.NOT_YET if is_there(name)]


def test_what_is_listed_as_missing_is_missing(run_in: Run) -> None:
    assert run_in(2, there_nonetheless)[0] == []
