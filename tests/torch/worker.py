"""One rank of a test world: runs the functions that the test process names, until told to stop.

Started by the launcher with the address of the test process. Knows nothing of pytest's machinery.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from types import ModuleType

import torch

import horovod.torch as hvd

_modules: dict[str, ModuleType] = {}


def module(path: str) -> ModuleType:
    if path not in _modules:
        name = f"tests_torch_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        _modules[path] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_modules[path])
    return _modules[path]


def main() -> None:
    faulthandler.register(
        signal.SIGUSR1, all_threads=True
    )  # the test process asks after a time-out
    torch.set_num_threads(1)
    address, key = sys.argv[1], bytes.fromhex(sys.argv[2])
    with Client(address, "AF_UNIX", authkey=key) as tests:
        hvd.init()
        tests.send((hvd.rank(), os.getpid()))
        while (order := tests.recv()) is not None:
            path, function, kwargs = order
            try:
                outcome = (None, getattr(module(path), function)(**kwargs))
            except BaseException:
                outcome = (traceback.format_exc(), None)
            tests.send_bytes(pickle.dumps(outcome))  # send() would share the memory of tensors
        hvd.shutdown()


if __name__ == "__main__":
    main()
