"""Loads the operators and shows them where the engine is; must not know what they do."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import tensorflow as tf

from horovod.common import basics

_PATH = Path(__file__).with_name("_native.so")


def _load() -> tuple[Any, Any]:
    """TensorFlow's wrappers of the operators, functions like ``horovod_allreduce``; the library.

    Raises:
        ImportError: the library is missing, or this TensorFlow lacks something it needs.
    """
    try:
        operators = tf.load_op_library(str(_PATH))
        library = ctypes.CDLL(str(_PATH))
    except (tf.errors.NotFoundError, OSError) as error:
        raise ImportError(
            f"horovod.tensorflow: the operators in {_PATH} can't be loaded: {error}"
        ) from error
    library.horovod_tensorflow_problem.restype = ctypes.c_char_p
    problem = library.horovod_tensorflow_problem().decode()
    if problem:
        raise ImportError(
            f"horovod.tensorflow: {problem}; it needs TensorFlow 2.16 or newer, and this is "
            f"{tf.__version__}"
        )
    library.horovod_tensorflow_bind.argtypes = [ctypes.c_uint64]
    library.horovod_tensorflow_bind.restype = None
    library.horovod_tensorflow_bind(basics.door_address())
    library.horovod_tensorflow_register_with_xla.restype = ctypes.c_char_p
    return operators, library


operators, _library = _load()


def register_with_xla() -> str:
    """Lets functions that XLA compiles have collectives; why they can't, or an empty string."""
    return str(_library.horovod_tensorflow_register_with_xla().decode())
