"""``import horovod.keras as hvd``: for the stand-alone ``keras``, on TensorFlow or PyTorch."""

from horovod._keras import face
from horovod._keras.distributed import backend
from horovod._keras.face import *  # noqa: F403
from horovod._keras.flavours import active_backend, standalone
from horovod._keras.loading import loader
from horovod.keras import callbacks

__all__ = [*face.__all__, "Compression", "callbacks", "load_model"]

Compression = backend(active_backend()).Compression
load_model = loader(standalone)
