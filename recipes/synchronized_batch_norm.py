"""Trains a model of `keras.applications` with `BatchNormalization` over the whole global batch.

    python recipes/synchronized_batch_norm.py
    horovodrun -np 2 python recipes/synchronized_batch_norm.py

`BatchNormalization` normalises by the rows of its own replica, so its numbers depend on how many
replicas there are; with `synchronized=True` it does not. Models of `keras.applications` are built
without it. `clone_model` builds them again, layer by layer, with what a function returns for each.
"""

import keras
import numpy as np

import tfdml


def synchronized(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Returns a new layer of the same configuration; `BatchNormalization` becomes synchronised.

    Args:
        layer: Layer of the cloned model.
    """
    config = layer.get_config()
    if isinstance(layer, keras.layers.BatchNormalization):
        config["synchronized"] = True
    return type(layer).from_config(config)


def main() -> None:
    """Train a small MobileNet to say which colour is the strongest in an image of noise."""
    keras.utils.set_random_seed(0)
    strengths = np.random.rand(256, 1, 1, 3)
    images = (np.random.rand(256, 32, 32, 3) * strengths).astype("float32")
    colours = strengths[:, 0, 0].argmax(axis=1)
    strategy = tfdml.HorovodStrategy()
    with strategy.scope():
        built = keras.applications.MobileNet(
            (32, 32, 3), 0.25, dropout=0, weights=None, classes=3, classifier_activation=None
        )
        model = keras.models.clone_model(built, clone_function=synchronized)
        model.set_weights(built.get_weights())  # Keeps pretrained weights loaded by `weights=`.
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(images, colours, batch_size=64, epochs=3)


if __name__ == "__main__":
    main()
