"""Trains a small net on scikit-learn's handwritten digits, in a loop of its own under tf.function.

horovodrun -np 2 python examples/tensorflow2_digits.py
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

TRAINING_IMAGES = 1437  # of 1797; the others are for the test


def digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All images, as 64 numbers each, and their labels, in an order that all ranks share."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    return data.data[order].astype("float32") / 16, data.target[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process")
    parser.add_argument("--lr", type=float, default=0.05, help="for one process")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    hvd.init()
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())

    images, labels = digits(args.seed)
    steps = TRAINING_IMAGES // hvd.size() // args.batch_size  # the same on all ranks
    mine = slice(hvd.rank(), TRAINING_IMAGES, hvd.size())
    train = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
    train = train.shuffle(TRAINING_IMAGES).batch(args.batch_size).take(steps)
    test = slice(TRAINING_IMAGES + hvd.rank(), None, hvd.size())

    layers = tf.keras.layers
    net = tf.keras.Sequential(
        [layers.Input((64,)), layers.Dense(128, activation="relu"), layers.Dense(10)]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)

    @tf.function
    def train_step(batch: tf.Tensor, truth: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(truth, net(batch, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    started = False
    for epoch in range(args.epochs):
        losses = []
        for batch, truth in train:
            losses.append(train_step(batch, truth))
            if not started:  # now the optimizer has all its variables too
                hvd.broadcast_variables(net.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables, root_rank=0)
                started = True
        loss = hvd.allreduce(tf.reduce_mean(losses), name="loss")
        right = tf.argmax(net(images[test]), 1) == labels[test]
        counts = [tf.math.count_nonzero(right), tf.size(right, tf.int64)]
        hits, total = hvd.allreduce(tf.stack(counts), op=hvd.Sum, name="counts").numpy()
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}/{args.epochs}  loss {loss:.4f}  "
                f"test accuracy {hits / total:.2%}"
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
