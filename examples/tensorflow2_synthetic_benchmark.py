"""Measures how many images a second a net trains on, per process and in all.

The images are random; only speed is looked at.

    horovodrun -np 2 python examples/tensorflow2_synthetic_benchmark.py --model MobileNetV2
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import tensorflow as tf

import horovod.tensorflow as hvd


def small_net(size: int, classes: int) -> tf.keras.Model:
    """Four convolutions, for machines on which those of tf.keras.applications take long."""
    layers = tf.keras.layers
    stack = [layers.Input((size, size, 3))]
    for width in (32, 64, 128, 256):
        stack.append(layers.Conv2D(width, 3, strides=2, padding="same", activation="relu"))
    return tf.keras.Sequential(
        [*stack, layers.GlobalAveragePooling2D(), layers.Dense(classes, activation="softmax")]
    )


def build_net(name: str, size: int, classes: int) -> tf.keras.Model:
    if name == "small":
        return small_net(size, classes)
    builder = getattr(tf.keras.applications, name, None)
    if not callable(builder):
        raise SystemExit(f"--model: tf.keras.applications has no {name}")
    return builder(weights=None, input_shape=(size, size, 3), classes=classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="ResNet50", help="of tf.keras.applications, or small (%(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="images per step and process")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of an edge")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--num-warmup-batches", type=int, default=2)
    parser.add_argument("--num-batches-per-iter", type=int, default=2)
    parser.add_argument("--num-iters", type=int, default=5, help="measurements, at least 2")
    args = parser.parse_args()

    hvd.init()
    tf.random.set_seed(hvd.rank())

    net = build_net(args.model, args.image_size, 1000)
    optimizer = tf.keras.optimizers.SGD(0.01 * hvd.size())
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy()
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    images = tf.random.uniform((args.batch_size, args.image_size, args.image_size, 3))
    labels = tf.random.uniform((args.batch_size,), maxval=1000, dtype=tf.int64)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, net(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))

    def train(batches: int) -> None:
        for _ in range(batches):
            step()

    def say(text: str) -> None:
        if hvd.rank() == 0:
            print(text)

    megabytes = 4e-6 * sum(math.prod(variable.shape) for variable in net.trainable_variables)
    say(
        f"{args.model}, {megabytes:.1f} MB of gradients, batch {args.batch_size} on each of "
        f"{hvd.size()} processes"
    )
    train(1)
    hvd.broadcast_variables(net.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    train(args.num_warmup_batches)
    rates = []
    for i in range(args.num_iters):
        started = time.perf_counter()
        train(args.num_batches_per_iter)
        seconds = time.perf_counter() - started
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        say(f"iteration {i + 1}: {rates[-1]:.2f} images/s on rank 0")

    # 95 % of a normal distribution lie within 1.96 standard deviations.
    means = hvd.allgather_object((statistics.mean(rates), 1.96 * statistics.stdev(rates)))
    for rank, (mean, spread) in enumerate(means):
        say(f"rank {rank}: {mean:.2f} +- {spread:.2f} images/s")
    total = sum(mean for mean, _ in means)
    spread = sum(spread for _, spread in means)  # ranks step together, so their errors add up
    say(f"total on {hvd.size()} processes: {total:.2f} +- {spread:.2f} images/s")
    hvd.shutdown()


if __name__ == "__main__":
    main()
