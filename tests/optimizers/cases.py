"""Cases run by ranks: training with tfdml's optimizers."""

import keras
import numpy as np
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
