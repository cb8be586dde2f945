"""Trains a small transformer with LAMB, a warm-up and mixed precision.

    python recipes/transformer.py
    horovodrun -np 2 python recipes/transformer.py --policy mixed_float16

It learns to predict the next character of Python's standard library, a text on every machine. The
result is measured in bits per character.
"""

import math
import sysconfig
from pathlib import Path
from typing import Annotated

import keras
import numpy as np
import typer

import tfdml

LENGTH = 64  # Characters of a sample.


def read_text(limit: int) -> bytes:
    """Returns source text of Python's standard library, in order of file names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return text[:limit]


def samples(text: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns characters and the characters that follow, int32 of shape (n, LENGTH), and classes.

    Args:
        text: The text.
    """
    codes, numbers = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    rows = (len(numbers) - 1) // LENGTH
    x = numbers[: rows * LENGTH].reshape(rows, LENGTH)
    y = numbers[1 : rows * LENGTH + 1].reshape(rows, LENGTH)
    return x.astype("int32"), y.astype("int32"), len(codes)


@keras.saving.register_keras_serializable("recipes")
class Positions(keras.layers.Layer):
    """Layer that adds a learned vector to each position of a sequence."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Creates the vectors."""
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, inputs):
        """Returns the inputs with the vectors added."""
        return inputs + self.vectors


def build_model(classes: int, width: int = 96, blocks: int = 2, heads: int = 4) -> keras.Model:
    """Builds a decoder with causal attention.

    Args:
        classes: Number of different characters.
        width: Size of a position's vector.
        blocks: Number of blocks, each of attention and two dense layers.
        heads: Number of attention heads.
    """
    layers = keras.layers
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(classes, width)(inputs))
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = layers.Add()([x, attention(normal, normal, use_causal_mask=True)])
        hidden = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(hidden)])
    logits = layers.Dense(classes)(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits))


class BitsPerCharacter(keras.metrics.MeanMetricWrapper):
    """Metric of the cross-entropy in bits."""

    def __init__(self, name: str = "bits"):
        loss = keras.losses.sparse_categorical_crossentropy
        super().__init__(lambda y, p: loss(y, p, from_logits=True) / math.log(2), name=name)


def main(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = 6,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a global batch.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="The highest rate.")] = 0.02,
    characters: Annotated[int, typer.Option(min=10_000, help="Length of the text.")] = 600_000,
    policy: Annotated[
        str, typer.Option(help="float32, mixed_bfloat16, mixed_float16; auto asks the hardware.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
) -> None:
    """Train a small transformer with LAMB, a warm-up and mixed precision."""
    keras.utils.set_random_seed(seed)
    strategy = tfdml.HorovodStrategy()
    if policy == "auto":
        policy = tfdml.mixed_precision.recommended_policy()
    keras.mixed_precision.set_global_policy(policy)
    x, y, classes = samples(read_text(characters))
    held_out = max(len(x) // 20, 1)
    steps = epochs * math.ceil((len(x) - held_out) / batch_size)
    falling = keras.optimizers.schedules.CosineDecay(learning_rate, steps)
    with strategy.scope():
        model = build_model(classes)
        model.compile(
            # With float16, Keras wraps it for loss scaling, which works on all replicas here.
            optimizer=tfdml.optimizers.LAMB(
                tfdml.schedules.LinearWarmup(falling, max(steps // 10, 1)),
                weight_decay=0.01,
                global_clipnorm=1.0,
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[BitsPerCharacter()],
        )
    history = model.fit(
        x[held_out:],
        y[held_out:],
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(x[:held_out], y[:held_out]),
        validation_batch_size=batch_size,
    ).history
    if strategy.is_chief:
        typer.echo(
            f"{policy}: {history['val_bits'][-1]:.3f} bits per character of text not seen, "
            f"{np.log2(classes):.3f} for guessing among {classes}"
        )


if __name__ == "__main__":
    typer.run(main)
