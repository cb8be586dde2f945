"""A hand-written training loop: two halves of a model under `tf.device`."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tools.bench.pipeline import keras_models
from tools.bench.pipeline.sizes import RATE, Sizes


def device_loop(sizes: Sizes, devices: list[str], num_microbatches: int) -> Callable[[], None]:
    """Returns a training step.

    Args:
        sizes: Sizes of the model and of a batch.
        devices: The device of each half.
        num_microbatches: Number of parts of the batch, whose gradients are added up; TensorFlow may
            work on several at a time. 1 for the whole batch at once.
    """
    halves = keras_models.build_halves(sizes, devices)
    loss_of = keras_models.loss_of(sizes)
    optimizers = []
    for half, device in zip(halves, devices, strict=True):
        with tf.device(device):
            optimizers.append(keras.optimizers.Adam(RATE))
            optimizers[-1].build(half.trainable_variables)
    weights = [half.trainable_variables for half in halves]
    x, y = map(tf.constant, keras_models.batch(sizes))

    def gradients(x: tf.Tensor, y: tf.Tensor) -> list:
        with tf.GradientTape() as tape:
            hidden = x
            for half, device in zip(halves, devices, strict=True):
                with tf.device(device):
                    hidden = half(hidden, training=True)
            with tf.device(devices[-1]):
                loss = loss_of(y, hidden) / num_microbatches
        return tape.gradient(loss, [v.value for own in weights for v in own])

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        total = None
        parts = zip(tf.split(x, num_microbatches), tf.split(y, num_microbatches), strict=True)
        for rows, labels in parts:
            own = list(map(tf.convert_to_tensor, gradients(rows, labels)))
            total = own if total is None else [a + b for a, b in zip(total, own, strict=True)]
        cut = len(weights[0])
        for number, device in enumerate(devices):
            with tf.device(device):
                own = total[cut:] if number else total[:cut]
                optimizers[number].apply(own, weights[number])

    return lambda: step(x, y)
