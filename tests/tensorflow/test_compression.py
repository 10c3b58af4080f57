"""Compressors cast what travels and nothing else."""

from __future__ import annotations

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.compression import Compressor
from laws import near

WIRE = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}


@pytest.mark.np(2)
@pytest.mark.parametrize("name", WIRE)
def test_wide_floats_are_cast_and_all_else_is_left_alone(name: str) -> None:
    compressor, wire = getattr(hvd.Compression, name), WIRE[name]
    for dtype in (tf.float64, tf.float32, tf.float16, tf.bfloat16, tf.int32, tf.bool, tf.complex64):
        tensor = tf.cast(tf.constant([0, 1, 1]), dtype)
        small, context = compressor.compress(tensor)
        wide = dtype in (tf.float64, tf.float32)
        assert small.dtype == (wire if wide and wire is not None else dtype)
        restored = compressor.decompress(small, context)
        assert restored.dtype == dtype
        assert bool(tf.reduce_all(restored == tensor))


@pytest.mark.np(2)
@pytest.mark.parametrize(("name", "tolerance"), [("none", 1e-7), ("fp16", 1e-3), ("bf16", 1e-2)])
def test_reductions_are_right_to_the_precision_of_the_wire(name: str, tolerance: float) -> None:
    own = tf.linspace(-1.0, 1.0, 50) * (hvd.rank() + 1.1)
    expected = tf.linspace(-1.0, 1.0, 50) * 1.6
    compression = getattr(hvd.Compression, name)
    near(hvd.allreduce(own, compression=compression), expected, tolerance)
    (grouped,) = hvd.grouped_allreduce([own], compression=compression)
    near(grouped, expected, tolerance)


@pytest.mark.np(2)
def test_compression_is_differentiable() -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        total = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
        loss = tf.reduce_sum(total) * (hvd.rank() + 1)
    near(tape.gradient(loss, x), tf.constant([3.0, 3.0]))


@pytest.mark.np(2)
def test_users_bring_their_own() -> None:
    class Halved(Compressor):
        @staticmethod
        def compress(tensor):
            return tensor / 2, 2.0

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * ctx * 10

    own = tf.constant([1.0, 3.0]) * (hvd.rank() + 1)
    near(hvd.allreduce(own, compression=Halved), tf.constant([15.0, 45.0]))
