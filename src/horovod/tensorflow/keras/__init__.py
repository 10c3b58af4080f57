"""``import horovod.tensorflow.keras as hvd``: for ``tf.keras``, whether Keras 3 or tf-keras."""

from typing import Any

import tensorflow as tf

from horovod._keras import face
from horovod._keras.face import *  # noqa: F403
from horovod._keras.loading import loader
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras import callbacks

__all__ = [*face.__all__, "Compression", "callbacks", "load_model"]


def _keras() -> Any:
    return tf.keras


load_model = loader(_keras)
