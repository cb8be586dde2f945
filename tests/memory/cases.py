"""Functions that real ranks run."""

import keras
import numpy as np

import tfdml
from tfdml.memory.graph_nodes import nbytes_of


def estimated_and_real(codec: str) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of residuals, slots and weights: estimated before a step, real after it."""
    strategy = tfdml.HorovodStrategy(compression=codec)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((40,)),
                layers.Dense(96, "relu"),
                layers.BatchNormalization(),
                layers.Dense(50),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    choice = tfdml.estimate_memory(model, 16, ranks=[2]).choices[0]
    model.fit(np.zeros((16, 40)), np.zeros((16, 1)), batch_size=16, verbose=0)
    state = strategy.extended.get_aggregator(model.optimizer).state
    real = {
        "residuals": sum(map(nbytes_of, state.values())),
        "slots": sum(map(nbytes_of, model.optimizer.variables)),
        "weights": sum(map(nbytes_of, model.weights)),
    }
    return {name: getattr(choice, name) for name in real}, real
