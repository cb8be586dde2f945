"""Functions that real ranks run."""

import keras
import numpy as np

import tfdml
from tests.memory.networks import recommender
from tfdml.memory import Choice
from tfdml.tensor_memory.graph_nodes import nbytes_of


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


# Of each parameter of a case with tables: the optimizer, and whether its other slots are sharded.
OPTIMIZERS = {
    "row_wise_adagrad": lambda: tfdml.optimizers.RowWiseAdagrad(0.1),
    "lazy_adam": lambda: tfdml.optimizers.LazyAdam(use_ema=True),
}


def estimated_and_real_tables(optimizer: str, sharding: bool) -> tuple[list[dict], dict[str, int]]:
    """Returns the bytes of weights and slots: estimated before and after a step, and real ones.

    The estimates are made in the job, whose tables are divided.
    """
    options = tfdml.Sharding(optimizer_state=sharding, embeddings=True, min_embedding_bytes=1 << 10)
    strategy = tfdml.HorovodStrategy(sharding=options)
    with strategy.scope():
        model = recommender(OPTIMIZERS[optimizer]())

    def estimated() -> dict[str, int]:
        choices = tfdml.estimate_memory(model, 16, ranks=[2]).choices
        (choice,) = (c for c in choices if _is(c, sharding))
        whole = next(c for c in choices if not c.divided_tables and not c.sharding)
        return {"weights": choice.weights, "slots": choice.slots, "whole": whole.weights}

    found = [estimated()]
    model.fit(np.zeros((16, 7), "int32"), np.zeros((16, 1)), batch_size=16, verbose=0)
    found.append(estimated())
    real = {
        "weights": sum(map(nbytes_of, model.weights)),
        "slots": sum(map(nbytes_of, model.optimizer.variables)),
    }
    return found, real


def _is(choice: Choice, sharding: bool) -> bool:
    return choice.divided_tables and choice.sharding == sharding and not choice.checkpointing
