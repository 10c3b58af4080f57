"""Batch normalization over the joined batch of all ranks; must not know how data travels.

The class derives from that of the Keras that ``tf.keras`` is, and is made at its first use, so that
importing the library loads no Keras.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common.process_sets import global_process_set
from horovod.tensorflow import collectives
from horovod.tensorflow.collectives import Sum
from horovod.tensorflow.internals import unconverted
from horovod.tensorflow.reduction import communicates

_NAME = "SyncBatchNormalization"
_DOC = """Normalizes as `tf.keras.layers.BatchNormalization` would on the joined batch of all ranks.

In training mode, mean and variance are those of all ranks' values together, however many each has;
a rank may also have none. Outputs, running statistics and gradients of inputs are those of the
joined batch. Gradients of gamma and beta are this rank's terms, which an averaging optimizer makes
those of the mean of the ranks' losses. In inference, and with one rank, it is ordinary batch
normalization without communication.

In training mode a call waits for the same layer's call on all other ranks, and so does its
gradient. Costs one allreduce of ``2 * channels + 1`` float64 numbers in each direction.

Args:
    fused: False; there is no other way.
    kwargs: as for `tf.keras.layers.BatchNormalization`.

Raises:
    ValueError: `fused` is something else.
"""


def __getattr__(name: str) -> Any:
    """Makes the class when it is first asked for."""
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[_NAME] = _made_for(tf.keras)
    return made


def _made_for(keras: Any) -> Any:
    """The class for the Keras whose module is given.

    Raises:
        ImportError: it doesn't run on TensorFlow, or hides what this needs.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ImportError(f"{_NAME} is for Keras on TensorFlow, and this one runs on {backend}")
    base = keras.layers.BatchNormalization
    if not hasattr(base, "_moments"):
        raise ImportError(f"{_NAME} does not know the {base.__module__} of this Keras")
    legacy = hasattr(base, "_fused_batch_norm")  # Keras 2, which has a kernel for all of it

    def __init__(self: Any, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(f"{_NAME} has no fused form: fused must be False, not {fused}")
        base.__init__(self, **kwargs, **({"fused": False} if legacy else {}))

    if legacy:

        def _moments(
            self: Any, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
        ) -> Any:
            if not communicates(global_process_set):
                return base._moments(self, inputs, reduction_axes, keep_dims, mask)
            return moments(inputs, reduction_axes, keep_dims, mask)
    else:

        def _moments(self: Any, inputs: Any, mask: Any) -> Any:  # type: ignore[misc]
            if not communicates(global_process_set):
                return base._moments(self, inputs, mask)
            return moments(inputs, self._reduction_axes, False, mask)

    body = {"__init__": __init__, "_moments": _moments, "__module__": __name__, "__doc__": _DOC}
    return keras.utils.register_keras_serializable("horovod")(type(_NAME, (base,), body))


@unconverted
def moments(x: Any, axes: Any, keepdims: bool, mask: Any = None) -> tuple[Any, Any]:
    """Mean and (biased) variance over some axes and over all ranks; differentiable.

    Each rank adds up `x` and its square around its own mean, in the type of `x`. From there on
    these are sums in float64, which one call can join: the relative error of the variance, 1e-16 *
    mean^2 / variance, is far below that of a float32 `x` itself. A sum over ranks is its own
    gradient, so that of `x` is the one of the sum of the ranks' losses.

    Args:
        x: floating-point, at least float32.
        axes: the dimensions that are reduced.
        keepdims: whether these stay, with length 1.
        mask: of the shape of `x` without its last dimension; what is False doesn't count.

    Returns:
        Two tensors of the type of `x`, equal on all ranks.
    """
    wide = tf.float64
    if mask is None:
        weights: Any = 1
        lengths = tf.gather(tf.shape(x, tf.int64), axes)
        count = tf.reshape(tf.cast(tf.reduce_prod(lengths), wide), [1] * x.shape.rank)
    else:
        weights = tf.broadcast_to(tf.cast(mask, x.dtype)[..., tf.newaxis], tf.shape(x))
        count = tf.reduce_sum(tf.cast(weights, wide), axes, keepdims=True)

    def total(terms: Any) -> Any:
        return tf.reduce_sum(terms * weights, axes, keepdims=True)

    shift = tf.math.divide_no_nan(total(x), tf.cast(count, x.dtype))
    shift = tf.stop_gradient(shift)  # the sums don't depend on it, only their rounding does
    first, second = total(x - shift), total(tf.square(x - shift))
    first, second, shift = (tf.cast(one, wide) for one in (first, second, shift))
    sums = [
        count,
        first + count * shift,
        second + 2.0 * shift * first + count * tf.square(shift),
    ]
    packed = collectives.allreduce(tf.concat([tf.reshape(one, [-1]) for one in sums], 0), op=Sum)
    parts = tf.split(packed, [one.shape.num_elements() for one in sums])
    count, first, second = (
        tf.reshape(part, one.shape) for part, one in zip(parts, sums, strict=True)
    )
    mean = tf.math.divide_no_nan(first, count)
    variance = tf.maximum(tf.math.divide_no_nan(second, count) - tf.square(mean), 0.0)
    mean, variance = tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
