"""Case of a model with dropout in each of two stages, which notes the masks."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.strategies.pipeline import cases

STEPS, MICROBATCHES, ROWS, WIDTH = 2, 3, 4, 8


def masks(seed: int) -> list[np.ndarray]:
    """Returns the masks of each step's microbatches: float32, `[stages, ROWS, WIDTH]` each."""
    seen = []

    def note(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        def keep(rows: np.ndarray) -> np.ndarray:
            seen.append(np.stack(np.split(rows, 2, 1)))
            return rows

        noted = tf.numpy_function(keep, [tf.stop_gradient(y_pred)], y_pred.dtype)
        with tf.control_dependencies([noted]):
            return tf.reduce_sum(y_pred, 1)

    stages = [["first"], ["second", "last"]]
    with cases.strategy(cases.ONE_GROUP, num_microbatches=MICROBATCHES, stages=stages).scope():
        keras.utils.set_random_seed(seed)
        inputs = layers.Input((WIDTH,))
        dropped = [layers.Dropout(0.5, name=name)(inputs) for name in ("first", "second")]
        last = layers.Dense(2 * WIDTH, use_bias=False, kernel_initializer="identity", name="last")
        model = keras.Model(inputs, last(layers.Concatenate()(dropped)))
        model.compile(keras.optimizers.SGD(0.0), note)
    rows = STEPS * MICROBATCHES * ROWS
    x = np.ones((rows, WIDTH), "float32")
    model.fit(x, x, batch_size=MICROBATCHES * ROWS, shuffle=False, verbose=0)
    return seen
