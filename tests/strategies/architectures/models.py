"""Architectures that are common in practice, in a small size.

Two blocks, a width of 16, no dropout; in the style of keras.io, or from `keras.applications`.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

# `keras.applications` only has ConvNeXt and ResNet in the papers' sizes.
from keras.src.applications.convnext import ConvNeXt
from keras.src.applications.resnet import ResNet, stack_residual_blocks_v1

from tests.recipes import cases as recipes

ROWS = 22
BLOCKS = 2
WIDTH = 16
LENGTH = 7
TOKENS = 20
CLASSES = 3


@dataclasses.dataclass
class Task:
    """A model with its data and training arguments.

    Attributes:
        model: Model, created in the scope.
        x: Inputs.
        y: Targets.
        compiled: Arguments of `compile`, without the optimizer.
        weights: Weight of each target, None for 1.
    """

    model: keras.Model
    x: Any
    y: Any
    compiled: dict[str, Any]
    weights: Any = None


def sentences(rng: np.random.Generator, length: int = LENGTH) -> np.ndarray:
    """Returns tokens of sentences of different lengths, padded with 0."""
    tokens = rng.integers(1, TOKENS, (ROWS, length))
    tokens[np.arange(length) >= rng.integers(2, length + 1, (ROWS, 1))] = 0
    return tokens


def classification() -> dict[str, Any]:
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


@keras.saving.register_keras_serializable("tests")
class TokensAndPositions(layers.Layer):
    """Sum of token and position embeddings; in reverse, the tokens' logits.

    A position's row is looked up once per step, for all sentences; a token's as often as it occurs.
    In reverse the embedding is a matrix, so its gradient has a sparse and a dense part.
    """

    def __init__(self, tokens: int = TOKENS, length: int = LENGTH, **options):
        super().__init__(**options)
        self.sizes = {"tokens": tokens, "length": length}
        self.tokens = layers.Embedding(tokens, WIDTH, mask_zero=True)
        self.positions = layers.Embedding(length, WIDTH)

    def build(self, shape):
        """Builds both embeddings."""
        self.tokens.build(shape)
        self.positions.build((None,))

    def call(self, inputs, reverse=False):
        """Returns vectors, of shape (rows, length, width), or logits of all tokens."""
        if reverse:
            return ops.matmul(inputs, ops.transpose(self.tokens.embeddings))
        return self.tokens(inputs) + self.positions(ops.arange(ops.shape(inputs)[-1]))

    def compute_output_spec(self, inputs, reverse=False):
        """Returns the shape of the embedding or of the logits."""
        last = self.sizes["tokens"] if reverse else WIDTH
        rows, length = inputs.shape[:2]
        return keras.KerasTensor((rows, length, last), self.compute_dtype)

    def compute_mask(self, inputs, previous=None):
        """Masks the padding."""
        return previous if previous is not None else self.tokens.compute_mask(inputs)

    def get_config(self):
        """Returns the constructor's arguments."""
        return {**super().get_config(), **self.sizes}


def _normal(x, biases: bool = True):
    return layers.LayerNormalization(center=biases)(x)


def _block(x, memory=None, causal: bool = False, biases: bool = True):
    """Attention, with cross-attention to `memory` if given, and two dense layers; all residual."""

    def attention():
        return layers.MultiHeadAttention(2, WIDTH // 2, use_bias=biases)

    normal = _normal(x, biases)
    x = layers.Add()([x, attention()(normal, normal, use_causal_mask=causal)])
    if memory is not None:
        x = layers.Add()([x, attention()(_normal(x, biases), memory)])
    hidden = layers.Dense(2 * WIDTH, activation="gelu", use_bias=biases)(_normal(x, biases))
    return layers.Add()([x, layers.Dense(WIDTH, use_bias=biases)(hidden)])


def decoder(rng: np.random.Generator) -> Task:
    """A language model like Gemma: causal, padded, with logits by the token embedding."""
    tokens = sentences(rng, LENGTH + 1)
    inputs = layers.Input((LENGTH,), dtype="int32")
    table = TokensAndPositions()
    x = table(inputs)
    for _ in range(BLOCKS):
        x = _block(x, causal=True, biases=False)
    outputs = table(_normal(x, biases=False), reverse=True)
    model = keras.Model(inputs, outputs)
    return Task(model, tokens[:, :-1], tokens[:, 1:], classification())


def encoder(rng: np.random.Generator) -> Task:
    """A classifier of padded sentences like BERT, with dense layers above a sentence's mean."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    x = TokensAndPositions()(inputs)
    for _ in range(BLOCKS):
        x = _block(x)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    outputs = layers.Dense(CLASSES)(layers.Dense(WIDTH, activation="tanh")(x))
    model = keras.Model(inputs, outputs)
    return Task(model, sentences(rng), rng.integers(0, CLASSES, ROWS), classification())


def encoder_decoder(rng: np.random.Generator) -> Task:
    """A translator like T5, one block per side: both share an embedding, and have masks."""
    source, target = sentences(rng), sentences(rng, LENGTH + 1)
    inputs = {
        "source": layers.Input((LENGTH,), dtype="int32", name="source"),
        "target": layers.Input((LENGTH,), dtype="int32", name="target"),
    }
    table = TokensAndPositions()
    memory, x = table(inputs["source"]), table(inputs["target"])
    memory = _normal(_block(memory, biases=False), biases=False)
    x = _block(x, memory, causal=True, biases=False)
    outputs = layers.Dense(TOKENS, use_bias=False)(_normal(x, biases=False))
    model = keras.Model(inputs, outputs)
    x = {"source": source, "target": target[:, :-1]}
    return Task(model, x, target[:, 1:], classification())


def images(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.normal(size=(ROWS, size, size, 3))


class Patches(layers.Layer):
    """Cuts an image into patches, and adds position embeddings."""

    def build(self, shape):
        """Builds the projection and the position embedding."""
        self.projection = layers.Conv2D(WIDTH, 4, strides=4)
        self.projection.build(shape)
        self.positions = layers.Embedding((shape[1] // 4) * (shape[2] // 4), WIDTH)
        self.positions.build((None,))

    def call(self, images):
        """Returns vectors, of shape (rows, patches, width)."""
        patches = self.projection(images)
        patches = ops.reshape(patches, (-1, self.positions.input_dim, WIDTH))
        return patches + self.positions(ops.arange(self.positions.input_dim))


def vit(rng: np.random.Generator) -> Task:
    """A vision transformer."""
    inputs = layers.Input((16, 16, 3))
    x = Patches()(inputs)
    for _ in range(BLOCKS):
        x = _block(x, biases=False)
    x = layers.Flatten()(_normal(x, biases=False))
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    return Task(model, images(rng, 16), rng.integers(0, CLASSES, ROWS), classification())


def convnext(rng: np.random.Generator) -> Task:
    """ConvNeXt with one block in its first and last stage."""
    model = ConvNeXt(
        depths=[1, 0, 0, 1],
        projection_dims=[WIDTH] * 4,
        input_shape=(32, 32, 3),
        include_preprocessing=False,
        layer_scale_init_value=0.1,
        classes=CLASSES,
        classifier_activation=None,
    )
    return Task(model, images(rng, 32), rng.integers(0, CLASSES, ROWS), classification())


def _synchronized(model: keras.Model) -> keras.Model:
    """Returns a model with synchronised `BatchNormalization`, created as in the recipe."""
    if str(recipes.RECIPES) not in sys.path:
        sys.path.insert(0, str(recipes.RECIPES))
    recipe = importlib.import_module("synchronized_batch_norm")
    return keras.models.clone_model(model, clone_function=recipe.synchronized)


def resnet(rng: np.random.Generator) -> Task:
    """A ResNet of two residual blocks, cloned with synchronised `BatchNormalization`."""
    model = ResNet(
        lambda x: stack_residual_blocks_v1(x, WIDTH // 4, BLOCKS, name="stack"),
        preact=False,
        use_bias=True,
        weights=None,
        input_shape=(32, 32, 3),
        classes=CLASSES,
        classifier_activation=None,
    )
    model = _synchronized(model)
    return Task(model, images(rng, 32), rng.integers(0, CLASSES, ROWS), classification())


def mobilenet(rng: np.random.Generator) -> Task:
    """The narrowest MobileNet, all blocks, cloned with synchronised `BatchNormalization`."""
    model = keras.applications.MobileNet(
        (32, 32, 3),
        alpha=0.25,
        dropout=0,
        weights=None,
        classes=CLASSES,
        classifier_activation=None,
    )
    model = _synchronized(model)
    return Task(model, images(rng, 32), rng.integers(0, CLASSES, ROWS), classification())


def _convolutions(x, filters: int):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
    return x


def unet(rng: np.random.Generator) -> Task:
    """A U-Net with three named outputs: classes of pixels, their depth, and the visible classes."""
    inputs = layers.Input((8, 8, 3))
    wide = _convolutions(inputs, WIDTH // 2)
    low = _convolutions(layers.MaxPooling2D()(wide), WIDTH)
    up = layers.Conv2DTranspose(WIDTH // 2, 2, strides=2)(low)
    x = _convolutions(layers.Concatenate()([wide, up]), WIDTH // 2)
    outputs = {
        "classes": layers.Conv2D(CLASSES, 1, name="classes")(x),
        "depth": layers.Conv2D(1, 1, name="depth")(x),
        "seen": layers.Dense(1, name="seen")(layers.GlobalAveragePooling2D()(low)),
    }
    model = _synchronized(keras.Model(inputs, outputs))
    y = {
        "classes": rng.integers(0, CLASSES, (ROWS, 8, 8)),
        "depth": rng.normal(size=(ROWS, 8, 8, 1)),
        "seen": rng.integers(0, 2, (ROWS, 1)),
    }
    compiled = {
        "loss": {
            "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "depth": "huber",
            "seen": keras.losses.BinaryCrossentropy(from_logits=True),
        },
        "loss_weights": {"classes": 1.0, "depth": 0.5, "seen": 0.2},
        "metrics": {"classes": ["accuracy"], "depth": ["mae"]},
    }
    return Task(model, images(rng, 8), y, compiled)


def time_series(rng: np.random.Generator) -> Task:
    """A forecast of two steps from ten, with a causal convolution, an LSTM and a GRU."""
    walks = rng.normal(size=(ROWS, 12, 3)).cumsum(1)
    inputs = layers.Input((10, 3))
    x = layers.Conv1D(WIDTH, 3, padding="causal", activation="relu")(inputs)
    x = layers.LSTM(WIDTH, return_sequences=True)(x)
    outputs = layers.Reshape((2, 3))(layers.Dense(6)(layers.GRU(WIDTH)(x)))
    compiled = {"loss": "mse", "metrics": ["mae"]}
    return Task(keras.Model(inputs, outputs), walks[:, :10], walks[:, 10:], compiled)


def recommender(rng: np.random.Generator, users: int = 5, items: int = 7) -> Task:
    """Embeddings of users and items; item rows are looked up for the item and for the history."""
    inputs = {
        "user": layers.Input((), dtype="int32", name="user"),
        "item": layers.Input((), dtype="int32", name="item"),
        "seen": layers.Input((3,), dtype="int32", name="seen"),
    }
    user = layers.Embedding(users, WIDTH)(inputs["user"])
    table = layers.Embedding(items, WIDTH)
    item, seen = table(inputs["item"]), layers.GlobalAveragePooling1D()(table(inputs["seen"]))
    match = layers.Dot(1)([layers.Add()([user, seen]), item])
    bias = layers.Embedding(items, 1)(inputs["item"])
    hidden = layers.Dense(WIDTH, activation="relu")(layers.Concatenate()([user, item, seen]))
    outputs = layers.Add()([match, bias, layers.Dense(1)(hidden)])
    x = {
        "user": rng.integers(0, users, ROWS),
        "item": rng.integers(0, items, ROWS),
        "seen": rng.integers(0, items, (ROWS, 3)),
    }
    compiled = {
        "loss": keras.losses.BinaryCrossentropy(from_logits=True),
        "metrics": [keras.metrics.AUC(from_logits=True)],
    }
    return Task(keras.Model(inputs, outputs), x, rng.integers(0, 2, (ROWS, 1)), compiled)


ARCHITECTURES: dict[str, Callable[[np.random.Generator], Task]] = {
    task.__name__: task
    for task in (
        decoder,
        encoder,
        encoder_decoder,
        vit,
        convnext,
        resnet,
        mobilenet,
        unet,
        time_series,
        recommender,
    )
}
