"""Trains a small convolutional net with Keras' fit() on scikit-learn's handwritten digits.

horovodrun -np 2 python examples/tensorflow2_keras_digits.py
TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python examples/tensorflow2_keras_digits.py   # Keras 2
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

TRAINING_IMAGES = 1437  # of 1797; the others are for the test


def digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All images, 8x8 pixels, and their labels, in an order that is the same on all ranks."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    return data.images[order, :, :, None].astype("float32") / 16, data.target[order]


def build_net() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process")
    parser.add_argument("--lr", type=float, default=1e-3, help="for one process")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--save", metavar="FILE", help="where rank 0 writes the trained model")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    hvd.init()
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())

    images, labels = digits(args.seed)
    # Every rank trains on its own part of the data, in equally many steps.
    steps = TRAINING_IMAGES // hvd.size() // args.batch_size
    mine = slice(hvd.rank(), TRAINING_IMAGES, hvd.size())
    train = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
    train = train.shuffle(TRAINING_IMAGES).batch(args.batch_size).take(steps)

    # size() times the batch bears size() times the rate, which the warm-up reaches step by step.
    rate = args.lr * hvd.size()
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.Adam(rate),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    net = build_net()
    net.compile(
        optimizer=optimizer,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    net.fit(
        train,
        epochs=args.epochs,
        shuffle=False,  # the data set does it
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(
                initial_lr=rate, warmup_epochs=2, steps_per_epoch=steps
            ),
        ],
    )

    if hvd.rank() == 0:  # all ranks have the same weights: one of them tests and saves
        test_images, test_labels = images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:]
        _, accuracy = net.evaluate(test_images, test_labels, verbose=0)
        print(f"{hvd.size()} processes: test accuracy {accuracy:.2%}")
        if args.save:
            net.save(args.save)  # opens without this library
    hvd.shutdown()


if __name__ == "__main__":
    main()
