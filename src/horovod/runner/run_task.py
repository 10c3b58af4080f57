"""What each process of ``horovod.run`` runs: fetch the function, call it, send back its result.

Started by its file name, so that it finds the package where the caller found it.
"""

from __future__ import annotations

import os
import pickle
import sys

if __name__ == "__main__":  # the script's own directory must not shadow anybody's modules
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import time
import traceback

from horovod.common import config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.store import StoreClient, read_key

_FETCH_S = 60.0


def connect(settings: config.Settings) -> StoreClient:
    """Connects to the store of the job that this process was started for."""
    if settings.store is None or settings.job_key_file is None or settings.job_id is None:
        raise RuntimeError("this program is started by horovod.run only")
    key = read_key(settings.job_key_file)
    return StoreClient(settings.store, key, settings.job_id, settings.rank)


def call(store: StoreClient) -> bytes:
    """Calls the caller's function and returns its pickled result."""
    import cloudpickle

    path, pickled = pickle.loads(store.get("func", _FETCH_S))
    sys.path[:] = path
    func, args, kwargs = pickle.loads(pickled)
    try:
        result = func(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        result = None
    try:
        pickled_result: bytes = cloudpickle.dumps(result)
    except Exception as error:  # whatever the object's own code raises
        kind = type(result).__name__
        raise RuntimeError(f"the result, a {kind}, can't be pickled: {error}") from error
    return pickled_result


def report(store: StoreClient, rank: int, error: BaseException) -> None:
    """Says in the store why this rank fails, before others can fail because of it.

    What comes of a failed collective is left to the engine's own report, which knows the cause.
    """
    if not _from_collective(error):
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        fault = {"lost": None, "exception": text, "text": text, "time": time.monotonic()}
        store.set(f"fault/{rank}", json.dumps(fault).encode())
    store.set(f"trace/{rank}", traceback.format_exc().encode("utf-8", "replace"))


def _from_collective(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, HorovodInternalError):
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> None:
    """Runs the task. An exception goes on to the interpreter, which prints it."""
    settings = config.from_environ()
    store = connect(settings)
    task = os.getpid()
    try:
        result = call(store)
        if os.getpid() == task:  # not a child that the function forked, which may end up here too
            store.set(f"result/{settings.rank}", result)
    except BaseException as error:
        if os.getpid() == task:
            report(store, settings.rank, error)
        raise
    finally:
        store.close()


if __name__ == "__main__":
    main()
