"""One rank of a test world: runs the functions that the test process names, until told to stop.

Started by the launcher with the address of the test process and the frameworks to prepare; others
are never imported. Knows nothing of pytest's machinery, nor of any front end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client
from pathlib import Path
from types import ModuleType

from horovod.common import basics

_modules: dict[str, ModuleType] = {}


def prepare_torch() -> None:
    import torch

    torch.set_num_threads(1)


def prepare_tensorflow() -> None:
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    _ = tf.keras.layers  # what is imported on demand belongs to the start, not to the first test


PREPARE = {"torch": prepare_torch, "tensorflow": prepare_tensorflow}


def prepare(frameworks: list[str]) -> None:
    """Imports what stays to the end, and so needn't be walked by any collection, nor at the end.

    TensorFlow leaves 365,000 objects; an interpreter that has to look at them ends 1.5 s of CPU
    time later, and the import itself takes a fifth less time while nothing looks at them.
    """
    gc.disable()
    for framework in frameworks:
        PREPARE[framework]()
    gc.freeze()
    gc.enable()


def module(path: str) -> ModuleType:
    if path not in _modules:
        folder = Path(path).parent
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))  # of what tests of a folder share
        name = f"tests_{folder.name}_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        _modules[path] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_modules[path])
    return _modules[path]


@contextlib.contextmanager
def settings(env: Mapping[str, str] | None) -> Iterator[None]:
    """An init() with variables besides, and afterwards one without them; None for neither."""
    if env is None:
        yield
        return
    basics.shutdown()
    os.environ.update(env)
    basics.init()
    try:
        yield
    finally:
        basics.shutdown()
        for name in env:
            del os.environ[name]
        basics.init()


def main() -> None:
    faulthandler.register(
        signal.SIGUSR1, all_threads=True
    )  # the test process asks after a time-out
    address, key, *frameworks = sys.argv[1:]
    prepare(frameworks)
    with Client(address, "AF_UNIX", authkey=bytes.fromhex(key)) as tests:
        basics.init()
        tests.send((basics.rank(), os.getpid()))
        while (order := tests.recv()) is not None:
            path, function, kwargs, env = order
            try:
                with settings(env):
                    outcome = (None, getattr(module(path), function)(**kwargs))
            except BaseException:
                outcome = (traceback.format_exc(), None)
            tests.send_bytes(pickle.dumps(outcome))  # send() would share the memory of tensors
        basics.shutdown()


if __name__ == "__main__":
    main()
