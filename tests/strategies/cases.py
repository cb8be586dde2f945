"""Cases run by ranks: small models on small data, and their comparable results."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job

CLASSES = 3


def data(rows: int, seed: int = 0, shape: tuple[int, ...] = (6,)) -> tuple[np.ndarray, np.ndarray]:
    """Returns `rows` samples and labels, the same on every rank."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, *shape)).astype("float32")
    y = (np.abs(x.reshape(rows, -1)[:, 0] * 2).astype("int64")) % CLASSES
    return x, y


def dense_model() -> keras.Model:
    """A classifier with a regulariser, so that the loss has both kinds of terms."""
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(CLASSES),
        ]
    )


def convolutional_model() -> keras.Model:
    """A functional model with a convolution, which TensorFlow cannot train on 0 rows."""
    inputs = layers.Input((8, 8, 1))
    hidden = layers.Conv2D(4, 3, activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(hidden)))


def stateful_model() -> keras.Model:
    """A model with stateful layers, whose state depends on the number of replicas."""
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )


class SubclassedModel(keras.Model):
    """A model that is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.outputs_ = layers.Dense(CLASSES)

    def call(self, inputs):
        """Returns logits."""
        return self.outputs_(self.hidden(inputs))


class InScope:
    """A constructor call to be made later, in the scope of the strategy."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any):
        self.call = (cls, args, kwargs)

    def __call__(self) -> Any:
        cls, args, kwargs = self.call
        return cls(*args, **kwargs)


MODELS = {
    "dense": (dense_model, (6,)),
    "stateful": (stateful_model, (6,)),
    "convolutional": (convolutional_model, (8, 8, 1)),
    "subclassed": (SubclassedModel, (6,)),
}


def compiled(strategy: tf.distribute.Strategy, model: str = "dense", **compile_options: Any):
    """Builds a model in the strategy's scope, with a different seed on each rank."""
    options = {
        "optimizer": InScope(keras.optimizers.Adam, 0.01),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **compile_options,
    }
    with strategy.scope():
        # Optimizers and metrics passed by a test are created in the scope too.
        options = {k: v() if isinstance(v, InScope) else v for k, v in options.items()}
        keras.utils.set_random_seed(11 + 100 * rank_job.rank())
        built = MODELS[model][0]()
        built.compile(**options)
    return built


def outcome(model: keras.Model, history: keras.callbacks.History | None = None) -> dict:
    """Returns what must be the same for every number of ranks."""
    result = {"weights": [v.numpy() for v in model.weights]}
    if history is not None:
        result["history"] = {k: np.array(v) for k, v in history.history.items()}
    return result


def fitted(model: keras.Model, x, y, rows: int = 16, epochs: int = 3, **options) -> dict:
    """Fits a model on batches of `rows`; returns what must be the same for any number of ranks."""
    history = model.fit(x, y, batch_size=rows, epochs=epochs, verbose=0, **options)
    return outcome(model, history)


def seed_ranks_apart() -> None:
    """Seeds each rank differently; rank 0 and a single process always have the same seed."""
    keras.utils.set_random_seed(11 + 100 * rank_job.rank())


def fit_arrays(
    rows: int = 101,
    batch: int = 16,
    epochs: int = 3,
    model: str = "dense",
    devices: int = 1,
    compile_options: dict | None = None,
    fit_options: dict | None = None,
) -> dict:
    """`fit`, `evaluate` and `predict` on arrays, on ranks with different seeds."""
    seed_ranks_apart()
    strategy = rank_job.strategy(devices)
    x, y = data(rows, shape=MODELS[model][1])
    built = compiled(strategy, model, **(compile_options or {}))
    validation = {"validation_data": (x[:50], y[:50])}
    seed_ranks_apart()
    history = built.fit(
        x, y, batch_size=batch, epochs=epochs, verbose=0, **(fit_options or validation)
    )
    return {
        **outcome(built, history),
        "evaluate": np.array(built.evaluate(x, y, batch_size=batch, verbose=0)),
        "predict": built.predict(x, batch_size=batch, verbose=0),
    }


def fit_without_strategy(rows: int = 101, batch: int = 16, epochs: int = 3) -> dict:
    """Plain Keras 3, without strategy or shuffling: the reference for one process."""
    seed_ranks_apart()
    x, y = data(rows)
    built = dense_model()
    built.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = built.fit(
        x,
        y,
        batch_size=batch,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        validation_data=(x[:50], y[:50]),
    )
    return {
        **outcome(built, history),
        "evaluate": np.array(built.evaluate(x, y, batch_size=batch, verbose=0)),
        "predict": built.predict(x, batch_size=batch, verbose=0),
    }


def fit_dataset(kind: str) -> dict:
    """`fit` on a `tf.data` pipeline of global batches."""
    keras.utils.set_random_seed(11)
    x, y = data(101)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    steps = None
    if kind == "shuffled":
        dataset = dataset.shuffle(101, seed=5).batch(16)
    elif kind == "unknown_cardinality":
        dataset = dataset.filter(lambda x, y: y < CLASSES).batch(16)
    elif kind == "repeated":
        dataset, steps = dataset.repeat().batch(16), 7
    elif kind == "generator":
        batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 101, 16)]
        signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    elif kind == "weighted":
        weights = np.linspace(0, 2, 101).astype("float32")
        dataset = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(16)
    built = compiled(rank_job.strategy(), weighted_metrics=["accuracy"])
    history = built.fit(dataset, epochs=3, steps_per_epoch=steps, verbose=0)
    return outcome(built, history)


def train_on_batches() -> dict:
    """`train_on_batch`, `test_on_batch` and `predict_on_batch` with global batches."""
    x, y = data(20)
    built = compiled(rank_job.strategy())
    logs = [built.train_on_batch(x[i : i + 7], y[i : i + 7]) for i in range(0, 20, 7)]
    logs.append(built.test_on_batch(x, y))
    return {**outcome(built), "logs": np.array(logs), "predict": built.predict_on_batch(x)}


def masked_loss(reduction: str) -> dict:
    """A sequence model whose mask leaves a different number of steps in each row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (40, 5))
    lengths = rng.integers(1, 6, 40)
    tokens[np.arange(5)[None] >= lengths[:, None]] = 0
    targets = rng.normal(size=(40, 5, 1)).astype("float32")
    strategy = rank_job.strategy()
    with strategy.scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((5,), dtype="int32"),
                layers.Embedding(9, 4, mask_zero=True),
                layers.SimpleRNN(4, return_sequences=True),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    weights = rng.uniform(size=(40, 1)).astype("float32")
    history = model.fit(
        tokens, targets, sample_weight=weights, batch_size=12, epochs=3, shuffle=False, verbose=0
    )
    return outcome(model, history)


def scalar_loss() -> dict:
    """A user's loss function that returns the mean itself."""
    x, y = data(53)
    built = compiled(
        rank_job.strategy(),
        loss=lambda y, p: tf.reduce_mean((tf.cast(y[:, None], p.dtype) - p) ** 2),
        metrics=[],
    )
    return outcome(built, built.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0))


def fit_float64(model: str) -> dict:
    """The same in float64, where less can be hidden by rounding."""
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x, y = data(101, shape=MODELS[model][1])
    strategy = rank_job.strategy()
    built = compiled(strategy, model, metrics=[])
    history = built.fit(x.astype("float64"), y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return outcome(built, history)
