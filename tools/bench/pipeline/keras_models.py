"""The models of `tools.bench.pipeline` in Keras, whole or in halves."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tools.bench.pipeline.sizes import HEADS, RATE, WORDS, Sizes


def build(sizes: Sizes, name: str) -> keras.Model:
    """Returns the whole model."""
    first, last = _parts(sizes)
    inputs = _inputs(sizes)
    return keras.Model(inputs, last(first(inputs)), name=name)


def build_halves(sizes: Sizes, devices: list[str]) -> list[keras.Model]:
    """Returns the two halves of the model, with the weights of each on a device."""
    halves = []
    inputs = _inputs(sizes)
    for part, device in zip(_parts(sizes), devices, strict=True):
        with tf.device(device):
            halves.append(keras.Model(inputs, part(inputs)))
        inputs = layers.Input(halves[0].output.shape[1:])
    return halves


def loss_of(sizes: Sizes) -> keras.Loss:
    """Returns the loss: of a batch, the mean of all rows or tokens."""
    if sizes.length:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.losses.MeanSquaredError()


def compiled(sizes: Sizes, name: str) -> keras.Model:
    """Returns the whole model, compiled with Adam."""
    model = build(sizes, name)
    model.compile(keras.optimizers.Adam(RATE), loss_of(sizes))
    return model


def batch(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a batch and their labels."""
    rng = np.random.default_rng(0)
    if sizes.length:
        tokens = rng.integers(0, WORDS, (sizes.rows, sizes.length + 1)).astype("int32")
        return tokens[:, :-1], tokens[:, 1:]
    shape = (sizes.rows, sizes.width)
    return rng.normal(size=shape).astype("float32"), rng.normal(size=shape).astype("float32")


def _inputs(sizes: Sizes) -> keras.KerasTensor:
    return (
        layers.Input((sizes.length,), dtype="int32")
        if sizes.length
        else layers.Input((sizes.width,))
    )


def _parts(sizes: Sizes) -> tuple[Callable, Callable]:
    """Returns the two halves as functions of symbolic tensors."""
    half = sizes.blocks // 2
    block = _transformer_block if sizes.length else _dense_block

    def first(x):
        if sizes.length:
            x = layers.Embedding(WORDS, sizes.width)(x)
        for _ in range(half):
            x = block(x, sizes.width)
        return x

    def last(x):
        for _ in range(sizes.blocks - half):
            x = block(x, sizes.width)
        return layers.Dense(WORDS)(layers.LayerNormalization()(x)) if sizes.length else x

    return first, last


def _dense_block(x: keras.KerasTensor, width: int) -> keras.KerasTensor:
    return layers.Dense(width, "relu")(x)


def _transformer_block(x: keras.KerasTensor, width: int) -> keras.KerasTensor:
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(HEADS, width // HEADS)(y, y, use_causal_mask=True)
    x = layers.Add()([x, y])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(width)(layers.Dense(4 * width, "gelu")(y))
    return layers.Add()([x, y])
