"""Adds up the gradients of several passes in eager code and in `tf.function`s."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.tensorflow.gradient_aggregation import Aggregation


class LocalGradientAggregationHelperEager(Aggregation):
    """Adds up gradients in eager code and in `tf.function`s.

    Variables are made at the first pass, so a function must have been allowed to make some. A pass
    that takes no step changes nothing else: the optimizer's ``iterations`` count steps, as they do
    with Keras 3's own gradient accumulation (Horovod 0.28 counted passes).
    """

    def _make_variable(self, value: Any, name: str) -> Any:
        return tf.Variable(value, trainable=False, name=f"aggregation_{name}")
