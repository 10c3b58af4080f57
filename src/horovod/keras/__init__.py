"""``import horovod.keras as hvd``: for the stand-alone ``keras``, on TensorFlow or PyTorch."""

from typing import Any

from horovod._keras import face
from horovod._keras.distributed import backend
from horovod._keras.face import *  # noqa: F403
from horovod._keras.flavours import active_backend, standalone
from horovod._keras.loading import loader
from horovod.keras import callbacks

__all__ = [*face.__all__, "Compression", "callbacks", "load_model"]  # noqa: F405  by __getattr__

load_model = loader(standalone)


def __getattr__(name: str) -> Any:
    """Compressors are those of the backend, which is asked for when somebody needs them."""
    if name == "Compression":
        return backend(active_backend()).Compression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
