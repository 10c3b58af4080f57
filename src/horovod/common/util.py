"""Helpers that programs import from ``horovod.common.util``; nothing in the library needs them."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

from horovod.common import basics, capabilities, logs, process_sets
from horovod.common.ops import ReduceOp, reduce_op

T = TypeVar("T")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
_PROBE_S = 60.0

# The object ``mpi_ops._basics``, which test programs ask for what no function above it says.
_basics = SimpleNamespace(
    **{name: getattr(basics, name) for name in basics.__all__},
    **ReduceOp.__members__,
    _get_process_set_ids_and_ranks=process_sets.ids_and_ranks,
)


def get_ext_suffix() -> str:
    """How names of native modules end here, for example ``.cpython-311-x86_64-linux-gnu.so``."""
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """The path of the native module ``args`` in the folder of the file ``pkg_path``."""
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError if the native module isn't there; ``ext_env_var`` says how to get it."""
    path = get_extension_full_path(pkg_path, *args)
    if not os.path.exists(path):
        raise ImportError(
            f"{ext_name} has no native library at {path}: install horovod again with "
            f"{ext_env_var}=1"
        )


@functools.cache
def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ``horovod.<ext_base_name>`` can be used; a new process imports it."""
    return _probe(f"import horovod.{ext_base_name}", verbose)


@functools.cache
def gpu_available(ext: str, verbose: bool = False) -> bool:
    """Whether the framework of ``horovod.<ext>`` sees a GPU.

    A new process asks it, so that this one doesn't take hold of a device.
    """
    question = f"import horovod.{ext} as it; raise SystemExit(not it._check_has_gpu())"
    return _probe(question, verbose)


def _probe(code: str, verbose: bool) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_S
        )
    except subprocess.TimeoutExpired as error:
        logs.LOGGER.warning("%s", error)
        return False
    if verbose and done.stderr:
        logs.LOGGER.warning("%s: %s", code, done.stderr)
    return done.returncode == 0


def mpi_built(verbose: bool = False) -> bool:
    """As the query of the front ends, which all answer the same."""
    return capabilities.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As the query of the front ends, which all answer the same."""
    return capabilities.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """As the query of the front ends, which all answer the same."""
    return capabilities.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """As the query of the front ends, which all answer the same."""
    return capabilities.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """As the query of the front ends, which all answer the same."""
    return capabilities.ccl_built()


def _cache(f: Callable[..., T]) -> Callable[..., T]:
    """Calls the function once for each combination of arguments."""
    return functools.cache(f)


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables and restores what was before; None leaves one as it is."""
    changes = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], ReduceOp]:
    """The function of ``(op, average)`` that says which reduction the two arguments mean."""
    return reduce_op


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether it is 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    """Whether ``iter(x)`` works."""
    return isinstance(x, Iterable) or hasattr(x, "__getitem__")


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version, of any form, is not older than ``target``.

    Raises:
        ValueError: ``target`` is not of the form ``a.b.c``, or one of the two is no text.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are texts, not {ver!r} and {target!r}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"the target {target!r} is not of the form a.b.c")
    numbers = [int(part) for part in re.findall(r"\d+", ver.partition("+")[0])[:3]]
    numbers += [0] * (3 - len(numbers))
    return numbers >= [int(part) for part in target.split(".")]
