"""Networks trained by `tools.bench.compression`, and their data."""

from collections.abc import Callable

import keras
import numpy as np

from tools.bench.compression.model import CLASSES, GLOBAL_BATCH, LAYERS, WIDTH

CHARACTERS, LENGTH = 8192, 64
# Of the small transformer, about as many as source text has.
FEW_CHARACTERS = 128


def mlp() -> keras.Model:
    """Returns dense layers of 25 million parameters: bound by communication."""
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    return keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES)])


def resnet20() -> keras.Model:
    """Returns the 20-layer residual network for images of 32 x 32: bound by computation.

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2.
    """
    layers = keras.layers
    convolution = {"padding": "same", "use_bias": False}
    inputs = layers.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, **convolution)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage > 0 and block == 0 else 1
            y = layers.Conv2D(width, 3, strides=stride, **convolution)(x)
            y = layers.ReLU()(layers.BatchNormalization()(y))
            y = layers.BatchNormalization()(layers.Conv2D(width, 3, **convolution)(y))
            if stride == 2:
                x = layers.Conv2D(width, 1, strides=2, **convolution)(x)
            x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def transformer() -> keras.Model:
    """Returns the recipe's decoder with a large embedding table."""
    from transformer import build_model

    return build_model(CHARACTERS, width=128)


def text() -> keras.Model:
    """Returns the recipe's decoder in the size of the training that shows what a codec costs."""
    from transformer import build_model

    return build_model(FEW_CHARACTERS, width=64)


def _vectors(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(rows, WIDTH)).astype("float32"), rng.integers(0, CLASSES, rows)


def _images(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(rows, 32, 32, 3)).astype("float32"), rng.integers(0, CLASSES, rows)


def _texts(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = rng.integers(0, CHARACTERS, (2, rows, LENGTH), np.int32)
    return x, y


def _characters(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = rng.integers(0, FEW_CHARACTERS, (2, rows, LENGTH), np.int32)
    return x, y


NETWORKS: dict[str, tuple[Callable, Callable]] = {
    "mlp": (mlp, _vectors),
    "resnet20": (resnet20, _images),
    "transformer": (transformer, _texts),
    "text": (text, _characters),
}


def data(network: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns some global batches."""
    return NETWORKS[network][1](np.random.default_rng(0), GLOBAL_BATCH * steps)
