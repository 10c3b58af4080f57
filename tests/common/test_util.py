"""The helpers that programs import from ``horovod.common.util``."""

from __future__ import annotations

import os

import pytest

from horovod.common import util
from horovod.common.ops import ReduceOp


def test_native_modules() -> None:
    path = util.get_extension_full_path(util.__file__, "..", "_core")
    assert path.endswith(util.get_ext_suffix())
    util.check_extension("horovod", "HOROVOD", util.__file__, "..", "_core")
    with pytest.raises(ImportError, match="nothing"):
        util.check_extension("horovod.nothing", "HOROVOD_WITH_NOTHING", util.__file__, "nothing")


def test_a_module_that_does_not_import_is_not_available() -> None:
    assert util.extension_available("common")
    assert not util.extension_available("nothing")
    assert not util.gpu_available("common")  # it has nobody to ask


def test_the_queries() -> None:
    assert util.EXTENSIONS == ["tensorflow", "torch", "mxnet"]
    assert util.gloo_built() is util.gloo_built(verbose=True) is True
    assert util.mpi_built() is util.ddl_built() is util.ccl_built() is False
    assert util.nccl_built() == 0


def test_cache_calls_once_for_each_argument() -> None:
    calls = []
    twice = util._cache(lambda x: calls.append(x) or 2 * x)
    assert [twice(1), twice(1), twice(2)] == [2, 2, 4]
    assert calls == [1, 2]


def test_env_restores_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_A", "before")
    monkeypatch.delenv("HVD_B", raising=False)
    with pytest.raises(KeyError), util.env(HVD_A="a", HVD_B="b", HVD_C=None):
        assert (os.environ["HVD_A"], os.environ["HVD_B"]) == ("a", "b")
        raise KeyError
    assert os.environ["HVD_A"] == "before" and "HVD_B" not in os.environ


def test_average_and_op() -> None:
    meaning = util.get_average_backwards_compatibility_fun(ReduceOp)
    assert meaning(None, None) is ReduceOp.Average
    assert meaning(ReduceOp.Min, None) is ReduceOp.Min
    with pytest.warns(DeprecationWarning):
        assert meaning(None, False) is ReduceOp.Sum
    with pytest.raises(ValueError, match="not both"):
        meaning(ReduceOp.Sum, True)


def test_numbers_and_versions() -> None:
    assert [n for n in range(-2, 20) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert util.is_iterable([]) and util.is_iterable("") and not util.is_iterable(3)
    for version, newer in (("2.1.0", True), ("2.10", True), ("2.0.9", False), ("2.1.0+cpu", True)):
        assert util.is_version_greater_equal_than(version, "2.1.0") is newer
    for wrong in ("2.1", "2.1.x", "2"):
        with pytest.raises(ValueError, match="the form"):
            util.is_version_greater_equal_than("2.1.0", wrong)
