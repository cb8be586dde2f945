"""Cases run by ranks: embeddings with rows used repeatedly in a batch, and dense equivalents."""

import keras
import numpy as np
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import outcome

ROWS, WIDTH, LOOKUPS = 6, 3, 4
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, global_clipnorm=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.5),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, clipvalue=0.05),
    "accumulating": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1, global_clipnorm=0.5)
    ),
    "row_wise_adagrad": lambda: tfdml.optimizers.RowWiseAdagrad(0.1, global_clipnorm=0.5),
    "lazy_adam": lambda: tfdml.optimizers.LazyAdam(0.1, clipnorm=0.5),
    "lamb": lambda: tfdml.optimizers.LAMB(0.1),
    "lars": lambda: tfdml.optimizers.LARS(0.1, momentum=0.9),
}


def model(one_hot: bool) -> keras.Model:
    """Returns an embedding and a layer above it, or a matrix multiplied by one-hot vectors."""
    ids = layers.Input((LOOKUPS,), dtype="int32")
    if one_hot:
        hidden = layers.Dense(WIDTH, use_bias=False)(keras.ops.one_hot(ids, ROWS, dtype="float64"))
    else:
        hidden = layers.Embedding(ROWS, WIDTH)(ids)
    return keras.Model(ids, layers.Dense(1)(layers.Flatten()(hidden)))


def train(optimizer: str, one_hot: bool = False, compile_options=(), **options) -> dict:
    """Trains in float64 on embedding rows that occur several times in each batch."""
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = rank_job.strategy(**options)
    with strategy.scope():
        trained = model(one_hot)
        trained.compile(OPTIMIZERS[optimizer](), "mse", **dict(compile_options))
    rng = np.random.default_rng(0)
    trained.set_weights([rng.normal(size=v.shape) for v in trained.weights])
    # The last two rows never occur, so only moments move them.
    x, y = rng.integers(0, ROWS - 2, (22, LOOKUPS)), rng.normal(size=(22, 1))
    if getattr(strategy, "synchronous", True):
        trained.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    else:
        # One batch after the other, in the order of one process.
        for begin in [*range(0, 22, 8)] * 2:
            trained.train_on_batch(x[begin : begin + 8], y[begin : begin + 8])
    return {**outcome(trained), "predictions": trained.predict(x, verbose=0)}


def train_asynchronously(optimizer: str) -> dict:
    """The same on parameter servers, one step at a time."""
    strategy = tfdml.ParameterServerStrategy()
    job_strategy, rank_job.strategy = rank_job.strategy, lambda: strategy
    try:
        return train(optimizer)
    finally:
        rank_job.strategy = job_strategy
