"""A small network whose memory can be worked out by hand, and its estimate."""

import keras

import tfdml
from tfdml.memory import Choice

ROWS, WIDTH, HIDDEN = 256, 32, 64
# A kernel and a bias of two layers, in float32.
WEIGHTS = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN + 1)
# Adam's iterations and learning rate.
SCALARS = 8 + 4


def network(optimizer="adam", loss="mse", **options) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(HIDDEN, "relu", **options), layers.Dense(1)]
    )
    model.compile(optimizer, loss)
    return model


def recommender(optimizer="adam", rows=101, **options) -> keras.Model:
    """Returns a table of rows of 16 numbers, of which a sample looks up 7, and a dense layer."""
    layers = keras.layers
    table = layers.Embedding(rows, 16, **options)
    body = [table, layers.GlobalAveragePooling1D(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *body])
    model.compile(optimizer, "mse")
    return model


def of(model: keras.Model, batch_size: int = ROWS, **options) -> Choice:
    """Returns the estimate for one rank."""
    return tfdml.estimate_memory(model, batch_size, ranks=[1], **options).choices[0]
