"""Candidate of `tools.bench.remat` in Keras, on the backend that `KERAS_BACKEND` names."""

import argparse

from tools.bench.harness import report
from tools.bench.remat.model import BLOCKS, DROPOUT, INNER, RATE, ROWS, STEPS, WIDTH, measured


def main(way: str, jit: str) -> None:
    """Measures one way of checkpointing, and reports it.

    Args:
        way: "none"; "tfdml.remat" of each block; "keras.RematScope" of each block.
        jit: Whether XLA compiles the step: "jit" or "graph".
    """
    import keras
    import numpy as np
    from keras import layers

    # On JAX, Keras's own remat fails if a block draws random numbers.
    dropout = [layers.Dropout(DROPOUT)] if keras.backend.backend() == "tensorflow" else []

    def block(number: int) -> keras.Layer:
        return keras.Sequential(
            [
                layers.LayerNormalization(),
                layers.Dense(INNER, activation="gelu"),
                *dropout,
                layers.Dense(WIDTH),
            ],
            name=f"block_{number}",
        )

    def build() -> keras.Model:
        inputs = hidden = layers.Input((WIDTH,))
        for number in range(BLOCKS):
            made = block(number)
            if way == "tfdml.remat":
                import tfdml

                made = tfdml.remat(made)
            hidden = layers.Add()([hidden, made(hidden)])
        return keras.Model(inputs, layers.Dense(1)(hidden))

    keras.utils.set_random_seed(1)
    if way == "keras.RematScope":
        names = [f"block_{number}" for number in range(BLOCKS)]
        with keras.RematScope("list_of_layers", layer_names=names):
            model = build()
    else:
        model = build()
    model.compile(keras.optimizers.SGD(RATE), "mse", jit_compile=jit == "jit")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS * STEPS, WIDTH)).astype("float32")
    y = rng.normal(size=(ROWS * STEPS, 1)).astype("float32")
    report(measured(lambda: model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", help='"none", "tfdml.remat" or "keras.RematScope".')
    parser.add_argument("jit", help='Whether XLA compiles the step: "jit" or "graph".')
    main(**vars(parser.parse_args()))
