"""Cases run by ranks: training with tfdml's optimizers."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import CLASSES, InScope, compiled, data, outcome, seed_ranks_apart
from tfdml import optimizers
from tfdml.schedules import LinearWarmup


def train(name: str, options: dict, policy: str = "float32") -> dict:
    """Trains with a warm-up on batches of which the last has 1 row."""
    keras.config.set_dtype_policy(policy)
    rate = LinearWarmup(0.5 if name == "LARS" else 0.02, 4)
    make = InScope(getattr(optimizers, name), rate, weight_decay=0.01, **options)
    x, y = data(49)
    model = compiled(rank_job.strategy(), optimizer=make)
    history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slots = [v.numpy() for v in inner.variables]
    return {**outcome(model, history), "slots": slots}


class Watching(layers.Layer):
    """Layer that keeps the graph in which it was called last."""

    def call(self, inputs):
        """Returns the inputs."""
        self.graph = tf.compat.v1.get_default_graph()
        return inputs


def whole_table_operations(name: str) -> dict:
    """Returns the operations of a train step that hold a whole table, and all kinds."""
    rows = 1003
    with rank_job.strategy().scope():
        model = keras.Sequential(
            [layers.Input((5,), dtype="int32"), Watching(), layers.Embedding(rows, 4),
             layers.Flatten(), layers.Dense(1)]
        )  # fmt: skip
        module = optimizers if hasattr(optimizers, name) else keras.optimizers
        model.compile(getattr(module, name)(0.1), "mse")
    model.fit(np.zeros((32, 5), "int32"), np.zeros((32, 1)), batch_size=8, verbose=0)
    graph, operations = model.layers[0].graph, []
    while isinstance(graph, tf.Graph):
        operations += graph.get_operations()
        graph = getattr(graph, "outer_graph", None)
    whole = [
        op.name for op in operations if any(t.shape.rank and t.shape[0] == rows for t in op.outputs)
    ]
    return {"whole": whole, "kinds": sorted({op.type for op in operations})}


def train_embedding(name: str) -> dict:
    """Trains an embedding with sparse gradients, clipped by their global norm."""
    tokens = np.random.default_rng(0).integers(0, 9, (40, 5))
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [layers.Input((5,), dtype="int32"), layers.Embedding(9, 4), layers.Flatten(),
             layers.Dense(CLASSES)]
        )  # fmt: skip
        model.compile(
            getattr(optimizers, name)(0.1, weight_decay=0.01, global_clipnorm=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(tokens, tokens.sum(1) % CLASSES, batch_size=12, epochs=3, verbose=0)
    return outcome(model, history)
