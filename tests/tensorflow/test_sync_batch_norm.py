"""C71: SyncBatchNormalization is BatchNormalization of the joined batch, on either Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.util import backing

pytestmark = pytest.mark.flavour("keras3", "tf_keras")

C = 3
SHAPES = {2: (), 3: (4,), 4: (2, 3), 5: (2, 1, 3)}
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
ROWS = [3, 5, 2]


def near(actual: Any, expected: Any, tolerance: float) -> None:
    actual, expected = (np.asarray(tf.cast(one, tf.float64)) for one in (actual, expected))
    assert actual.shape == expected.shape
    limit = tolerance * max(1.0, np.max(np.abs(expected), initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


def batches(rows: list[int], shape: tuple[int, ...], dtype: str, mean: float = 5.0) -> list[Any]:
    """Everybody's batches, rounded to `dtype`, in float64."""
    random = np.random.default_rng(len(shape))
    made = [random.normal(mean, 2, (n, *shape, C)) for n in rows]
    return [tf.cast(tf.cast(batch, dtype), tf.float64) for batch in made]


def pair(dtype: str, dimensions: int = 2, **options: Any) -> tuple[Any, Any]:
    """The layer under test, and the reference in float64, with the same parameters."""
    legacy = hasattr(tf.keras.layers.BatchNormalization, "_fused_batch_norm")
    plain = tf.keras.layers.BatchNormalization(
        dtype="float64", **options, **({"fused": False} if legacy else {})
    )
    policy = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}.get(dtype, dtype)
    layer = hvd.SyncBatchNormalization(dtype=policy, **options)
    for one in (layer, plain):
        one.build((None,) * (dimensions - 1) + (C,))
        if options.get("scale", True):
            one.gamma.assign([0.5, -1.0, 2.0])
        if options.get("center", True):
            one.beta.assign([0.25, 0.5, -0.125])
    return layer, plain


def weights_of(position: int, shape: Any) -> Any:
    """What a loss multiplies outputs with: not symmetric, or gradients of inputs vanish."""
    return tf.constant(np.random.default_rng(position).normal(size=shape))


def check(
    rows: list[int],
    dimensions: int,
    dtype: str = "float32",
    traced: bool = False,
    mean: float = 5.0,
    **options: Any,
) -> None:
    own = batches(rows, SHAPES[dimensions], dtype, mean)
    layer, plain = pair(dtype, dimensions, **options)
    x, rank = tf.cast(own[hvd.rank()], dtype), hvd.rank()
    weights = [weights_of(i, batch.shape) for i, batch in enumerate(own)]

    def step(x: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, tf.float64) * weights[rank])
        return y, *tape.gradient(loss, [x, [backing(one) for one in layer.trainable_variables]])

    y, grad, of_parameters = (tf.function(step) if traced else step)(x)
    assert y.dtype == x.dtype

    whole = tf.concat(own, 0)
    with tf.GradientTape() as tape:
        tape.watch(whole)
        expected = plain(whole, training=True)
        loss = tf.reduce_sum(expected * tf.concat(weights, 0))
    parameters = [backing(one) for one in plain.trainable_variables]
    expected_grad, expected_of_parameters = tape.gradient(loss, [whole, parameters])

    tolerance = TOLERANCE[dtype]
    near(y, tf.split(expected, rows)[rank], tolerance)
    near(grad, tf.split(expected_grad, rows)[rank], tolerance)
    for one, reference in zip(of_parameters, expected_of_parameters, strict=True):
        near(hvd.allreduce(one, op=hvd.Sum), reference, tolerance)
    statistics = 1e-12 if dtype == "float64" else 1e-6  # float32 also for 16-bit inputs
    near(layer.moving_mean, plain.moving_mean, statistics)
    near(layer.moving_variance, plain.moving_variance, statistics)


@pytest.mark.np(2)
@pytest.mark.parametrize("dimensions", SHAPES)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_uneven_batches_of_any_rank(dimensions: int, traced: bool) -> None:
    check([3, 5], dimensions, traced=traced)


@pytest.mark.np(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_types(dtype: str) -> None:
    check([3, 5], 4, dtype)


@pytest.mark.np(2)
@pytest.mark.parametrize("rows", [[1, 4], [4, 1], [1, 1], [0, 4]], ids=str)
def test_small_batches(rows: list[int]) -> None:
    check(rows, 2, "float64")


@pytest.mark.np(2)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_with_and_without_parameters(center: bool, scale: bool) -> None:
    check([3, 5], 3, center=center, scale=scale)


@pytest.mark.np(2)
def test_a_mean_far_from_zero_costs_no_precision() -> None:
    # In float32, the difference of E[x^2] and E[x]^2 would have an error of about 1.
    own = batches([64, 48], (), "float32", mean=3e3)
    layer, plain = pair("float32", momentum=0.0)
    layer(tf.cast(own[hvd.rank()], tf.float32), training=True)
    plain(tf.concat(own, 0), training=True)
    near(layer.moving_variance, plain.moving_variance, 1e-6)


@pytest.mark.np(2)
def test_inference_is_local_and_ordinary() -> None:
    layer, plain = pair("float64")
    for one in (layer, plain):
        one.moving_mean.assign([1.0, 2.0, 3.0])
        one.moving_variance.assign([1.0, 4.0, 9.0])
    x = batches([3, 5], (), "float64")[hvd.rank()]
    if hvd.rank() == 0:  # nobody waits for the others
        near(layer(x, training=False), plain(x, training=False), 1e-12)
        layer.trainable = False
        near(layer(x, training=True), plain(x, training=False), 1e-12)


@pytest.mark.np(2)
def test_masked_values_do_not_count() -> None:
    own = batches([3, 5], (4,), "float64")
    masks = [np.arange(batch.shape[0] * 4).reshape(-1, 4) % 3 != 0 for batch in own]
    layer, plain = pair("float64", 3, momentum=0.0)
    layer(own[hvd.rank()], training=True, mask=tf.constant(masks[hvd.rank()]))
    plain(tf.concat(own, 0), training=True, mask=tf.concat(masks, 0))
    # Keras 3 adds 1e-7 to the count; we don't.
    near(layer.moving_mean, plain.moving_mean, 1e-6)
    near(layer.moving_variance, plain.moving_variance, 1e-6)


@pytest.mark.np(2)
@pytest.mark.parametrize("fused", [True, None])
def test_there_is_no_fused_form(fused: bool | None) -> None:
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=fused)


@pytest.mark.np(2)
def test_it_is_a_layer_like_others() -> None:
    layer = hvd.SyncBatchNormalization(fused=False, momentum=0.8)
    assert isinstance(layer, tf.keras.layers.BatchNormalization)
    assert layer.name.startswith("sync_batch_normalization")
    copy = type(layer).from_config(layer.get_config())
    assert copy.momentum == 0.8
    model = tf.keras.Sequential([tf.keras.layers.Input((C,)), layer])
    again = tf.keras.models.clone_model(model)
    assert isinstance(again.layers[-1], type(layer))
    assert hvd.SyncBatchNormalization is type(layer)
