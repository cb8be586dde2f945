"""Cases run by ranks: inputs, layers and steps that need more than a sum of gradients."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import data, dense_model, outcome, seed_ranks_apart


def float8(accumulate: int | None = None) -> dict:
    """Layers quantised to float8: their scales depend on the maxima of the global batch."""
    strategy = rank_job.strategy()
    with strategy.scope():
        seed_ranks_apart()
        model = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh")])
        model.add(layers.Dense(5))
        for layer in model.layers:
            layer.quantize("float8")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate), loss)
    x, y = data(33)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    weights = [v for v in model.trainable_weights if not v.overwrite_with_gradient]
    scales = [v.numpy() for v in model.trainable_weights if v.overwrite_with_gradient]
    return {"weights": [v.numpy() for v in weights], "scales": scales}


class OwnNumbers(keras.Model):
    """A model whose steps return Python numbers as well."""

    def train_step(self, batch):
        """Adds a float, an int and a NumPy number to Keras's logs."""
        return {**super().train_step(batch), "float": 10.0, "int": 3, "numpy": np.float32(2.5)}

    def test_step(self, batch):
        """Adds a float to the logs."""
        return {**super().test_step(batch), "float": 5.0}


def own_numbers() -> dict:
    """Trains with Python numbers in the logs."""
    x, y = data(33)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        inputs = layers.Input((6,))
        model = OwnNumbers(inputs, layers.Dense(3)(inputs))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y))
    assert history.history["int"] == [3.0]
    assert history.history["val_float"] == [5.0]
    return outcome(model, history)


def on_batches(run_eagerly: bool, jit_compile: bool = False, built: bool = True) -> dict:
    """The `*_on_batch` methods, and `predict` of an unbuilt model."""
    x, y = data(7)
    results = []
    for method in ("train_on_batch", "test_on_batch", "predict_on_batch", "predict"):
        with rank_job.strategy().scope():
            seed_ranks_apart()
            model = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)])
            if built:
                model.build((None, 6))
            model.compile(
                "sgd",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                run_eagerly=run_eagerly,
                jit_compile=jit_compile,
            )
        given = (x,) if "predict" in method else (x, y)
        options = {"verbose": 0} if method == "predict" else {}
        results.append(getattr(model, method)(*given, **options))
    return {**outcome(model), "results": [np.array(r) for r in results]}


def several_inner_optimizers() -> dict:
    """Optimizer that delegates to others, wrapped in a loss scale."""
    x, y = data(33)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = dense_model()
        _, second = model.layers
        by_path = {f"{second.path}/.*": keras.optimizers.Adam(0.01)}
        chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), by_path)
        inner = keras.optimizers.MultiOptimizer(chosen)
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return outcome(model, history)


def synchronized(rows: str) -> dict:
    """Synchronized `BatchNormalization` in float64 on replicas with different rows.

    Args:
        rows: "masked": some rows are masked. "few": fewer rows than replicas. "unequal": batches of
            unknown shapes, for which one replica's share has a fixed size. "lost": a mask in the
            loss, whose entries are counted, with the same batches.
    """
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    rng = np.random.default_rng(0)
    tokens, y = rng.integers(0, 5, (15, 4)), rng.normal(size=(15, 4, 2))
    with rank_job.strategy().scope():
        model = keras.Sequential([layers.Input((4,)), layers.Embedding(5, 3, mask_zero=True)])
        model.add(layers.Dense(3))
        if rows != "masked":
            model.add(NoMask())
        if rows != "lost":
            model.add(layers.BatchNormalization(synchronized=True))
        model.add(layers.Dense(2))
        if rows == "lost":
            model.add(OddRows())
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.set_weights([rng.normal(size=v.shape) ** 2 for v in model.weights])
    if rows in ("masked", "few"):
        sizes = (8, 7) if rows == "masked" else (2, 1, 8, 4)
        for size, end in zip(sizes, np.cumsum(sizes), strict=True):
            model.train_on_batch(tokens[end - size : end], y[end - size : end])
        return outcome(model)
    batches = tf.data.Dataset.from_tensor_slices((tokens, y)).batch(8)
    # One at a time, so that each shape has its own graph.
    unknown = batches.filter(lambda *batch: True)
    return outcome(model, model.fit(unknown, epochs=2, verbose=0))


class NoMask(layers.Layer):
    """Removes the mask."""

    supports_masking = True

    def call(self, inputs):
        """Returns the inputs."""
        return keras.ops.copy(inputs)

    def compute_mask(self, inputs, mask=None):
        """Returns no mask."""


class OddRows(NoMask):
    """Masks small values, so that replicas count different numbers of rows."""

    def compute_mask(self, inputs, mask=None):
        """Returns the mask of the rows that count in the loss."""
        return keras.ops.max(inputs, -1) > 0.0


class EitherOrBoth(keras.Model):
    """A model whose second input may be missing."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        """Returns logits."""
        first, second = inputs
        return self.dense(first if second is None else first + second)


def missing_input(source: str) -> dict:
    """An input that is None: in arrays, a dataset, or from a generator."""
    x, y = data(13)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = EitherOrBoth()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def batches():
        for begin in range(0, 13, 4):
            yield (x[begin : begin + 4], None), y[begin : begin + 4]

    if source == "arrays":
        given = {"x": (x, None), "y": y, "batch_size": 4, "shuffle": False}
    elif source == "dataset":
        given = {"x": tf.data.Dataset.from_tensor_slices(((x, None), y)).batch(4)}
    else:
        given = {"x": batches(), "steps_per_epoch": 4}
    history = model.fit(**given, verbose=0)
    predicted = model.predict((x, None), batch_size=4, verbose=0)
    single = model.train_on_batch((x[:5], None), y[:5])
    return {**outcome(model, history), "predicted": predicted, "single": np.array(single)}


def sparse_input(source: str) -> dict:
    """A sparse input: a scipy matrix, a sparse tensor, or a dataset of them."""
    x, y = data(13)
    x[np.abs(x) < 0.5] = 0.0
    with rank_job.strategy().scope():
        seed_ranks_apart()
        # Built from the data, so the width must be known, also from a sparse tensor's shape.
        model = keras.Sequential([layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tensor = tf.sparse.from_dense(x)
    if source == "scipy":
        from scipy.sparse import csr_matrix

        given = {"x": csr_matrix(x), "y": y, "batch_size": 4, "shuffle": False}
    elif source == "tensor":
        given = {"x": tensor, "y": y, "batch_size": 4, "shuffle": False}
    else:
        given = {"x": tf.data.Dataset.from_tensor_slices((tensor, y)).batch(4)}
    history = model.fit(**given, verbose=0)
    predicted = model.predict(tensor, batch_size=4, verbose=0)
    single = model.train_on_batch(tensor, y)
    return {**outcome(model, history), "predicted": predicted, "single": np.array(single)}


def predicted_rows(kind: str) -> dict:
    """`predict` of a model whose outputs are ragged or sparse."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 4, 13)
    values = np.arange(1, 1 + lengths.sum(), dtype="float32")
    ragged = tf.RaggedTensor.from_row_lengths(values, lengths)

    class Doubled(keras.Model):
        def call(self, inputs):
            doubled = inputs * 2.0
            return (
                doubled
                if kind == "ragged"
                else tf.sparse.from_dense(doubled.to_tensor(shape=(None, 3)))
            )

    with rank_job.strategy().scope():
        model = Doubled()
    dataset = tf.data.Dataset.from_tensor_slices(ragged).batch(4)
    predicted = model.predict(dataset, verbose=0)
    if kind == "sparse":
        predicted = tf.RaggedTensor.from_sparse(predicted)
    return {
        "weights": [],
        "values": predicted.flat_values.numpy(),
        "lengths": predicted.row_lengths().numpy(),
    }
