"""Cases run by ranks: models with many kinds of layers, losses and metrics."""

import keras
import numpy as np
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import CLASSES, data, fitted, seed_ranks_apart


def several_outputs() -> dict:
    """Two outputs with different weighted losses; each loss is logged."""
    x, y = data(64)  # 51 rows to train on: the last batch has 3, so no size is static or even.
    with rank_job.strategy().scope():
        seed_ranks_apart()
        inputs = layers.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        outputs = {"a": layers.Dense(CLASSES)(hidden), "b": layers.Dense(1)(hidden)}
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            loss={
                "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "b": keras.losses.MeanSquaredError(),
            },
            loss_weights={"a": 1.0, "b": 0.3},
            metrics={"a": ["accuracy"], "b": ["mae"]},
        )
    return fitted(model, x, {"a": y, "b": x[:, :1]}, validation_split=0.2)


def many_metrics() -> dict:
    """Metrics whose states are sums, histograms and matrices."""
    x, y = data(50)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential([layers.Input((6,)), layers.Dense(1, activation="sigmoid")])
        model.compile(
            keras.optimizers.SGD(0.1),
            "binary_crossentropy",
            metrics=[
                keras.metrics.AUC(),
                keras.metrics.Precision(),
                keras.metrics.BinaryIoU([0, 1], 0.5),
                keras.metrics.F1Score(),
            ],
        )
    return fitted(model, x, (y[:, None] > 0).astype("float32"), validation_split=0.3)


def synchronized_batch_norm() -> dict:
    """`BatchNormalization(synchronized=True)`: statistics of the global batch."""
    x, y = data(48)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(8),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(CLASSES),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return fitted(model, x, y, rows=12)


def sparse_gradients() -> dict:
    """An embedding, attention with a mask, a frozen layer and a layer without gradient."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 50, (40, 7))
    tokens[np.arange(7)[None] >= rng.integers(2, 8, 40)[:, None]] = 0
    with rank_job.strategy().scope():
        seed_ranks_apart()
        inputs = layers.Input((7,), dtype="int32")
        embedded = layers.Embedding(50, 4, mask_zero=True)(inputs)
        attended = layers.MultiHeadAttention(2, 4)(embedded, embedded)
        recurrent = layers.GRU(4)(attended)
        frozen = layers.Dense(4, trainable=False)
        model = keras.Model(inputs, layers.Dense(CLASSES)(frozen(recurrent)))
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return fitted(model, tokens, rng.integers(0, CLASSES, 40), rows=12)


def recurrent_and_attention() -> dict:
    """Masked sequences of different lengths through an LSTM and an attention layer."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (33, 7))
    tokens[np.arange(7)[None, :] >= rng.integers(2, 8, (33, 1))] = 0
    y = rng.integers(0, 3, 33)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        inputs = layers.Input((7,), dtype="int64")
        embedded = layers.Embedding(20, 8, mask_zero=True)(inputs)
        hidden = layers.LSTM(8, return_sequences=True)(embedded)
        attended = layers.MultiHeadAttention(2, 4)(hidden, hidden)
        outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(attended))
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return fitted(model, tokens, y)


class WithSpareWeights(keras.Model):
    """A model with a frozen layer, and with one that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.frozen = layers.Dense(8, trainable=False)
        self.spare = layers.Dense(4)
        self.out = layers.Dense(5)

    def build(self, shape):
        """Builds all layers, the spare one too."""
        self.frozen.build(shape)
        self.spare.build(shape)
        self.out.build((None, 8))

    def call(self, inputs):
        """Leaves the spare layer out."""
        return self.out(self.frozen(inputs))


def variables_without_gradient() -> dict:
    """Frozen weights, and weights without a gradient, do not change."""
    x, y = data(33)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = WithSpareWeights()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return fitted(model, x, y)


class WithAddedLoss(layers.Layer):
    """Layer that adds the mean square of its input to the loss."""

    def call(self, inputs):
        """Returns `inputs`."""
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def added_loss() -> dict:
    """`add_loss` with a mean over rows, and an activity regulariser."""
    x, y = data(50)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(8), WithAddedLoss(), layers.Dense(CLASSES)]
        )
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return fitted(model, x, y)


def tutorial() -> dict:
    """The model of beginners' tutorials, on noise in the shape of its images."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1100, 28, 28)).astype("float32")
    y = rng.integers(0, 10, 1100)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((28, 28)),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return fitted(model, x, y, rows=256, epochs=4)
