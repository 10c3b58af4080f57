"""Callbacks for the stand-alone ``keras``; `horovod._keras.callbacks` does the work."""

from horovod._keras.callbacks import public
from horovod._keras.flavours import standalone

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
) = public(standalone(), __name__)
