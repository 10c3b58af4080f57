"""Callbacks for ``tf.keras``, whether Keras 3 or tf-keras; `horovod._keras.callbacks` does it."""

import tensorflow as tf

from horovod._keras.callbacks import public

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    BestModelCheckpoint,
) = public(tf.keras, __name__)
