"""Cases run by ranks: one property of training each."""

import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import (
    InScope,
    compiled,
    data,
    dense_model,
    fitted,
    seed_ranks_apart,
)


@keras.saving.register_keras_serializable("tfdml-tests")
class Recorder(layers.Layer):
    """Layer that passes its input on, and records the first column of this rank's rows."""

    def __init__(self):
        super().__init__()
        self.seen: list[list[int]] = []

    def call(self, inputs, training=False):
        """Returns `inputs`."""
        if training:
            tf.numpy_function(self._remember, [inputs[:, 0]], [])
        return inputs

    def _remember(self, column: np.ndarray) -> None:
        self.seen.append([int(i) for i in column])


def samples_by_epoch(shuffle: bool | str, rows: int = 96, batch: int = 12) -> list[list[int]]:
    """Returns the samples that this rank trained on, for each of two epochs."""
    seed_ranks_apart()
    ids = np.arange(rows, dtype="float32")[:, None]
    strategy = rank_job.strategy()
    with strategy.scope():
        recorder = Recorder()
        model = keras.Sequential([layers.Input((1,)), recorder, layers.Dense(1)])
        model.compile("sgd", "mse")
    epochs = []
    for _ in range(2):
        recorder.seen.clear()
        model.fit(ids, ids, batch_size=batch, epochs=1, shuffle=shuffle, verbose=0)
        epochs.append([i for batch in recorder.seen for i in batch])
    # The same again within one `fit`, where the pipeline is made once.
    recorder.seen.clear()
    model.fit(ids, ids, batch_size=batch, epochs=2, shuffle=shuffle, verbose=0)
    both = [i for batch in recorder.seen for i in batch]
    return [*epochs, both[: len(both) // 2], both[len(both) // 2 :]]


def clipped_update_norm() -> float:
    """Returns the norm of the update by one step with `global_clipnorm=1` and rate 1."""
    x, y = data(24)
    optimizer = InScope(keras.optimizers.SGD, 1.0, global_clipnorm=1.0)
    model = compiled(rank_job.strategy(), optimizer=optimizer)
    before = [v.numpy() for v in model.trainable_weights]
    model.fit(x * 100, y, batch_size=24, epochs=1, verbose=0)
    moved = [v.numpy() - b for v, b in zip(model.trainable_weights, before, strict=True)]
    return float(np.sqrt(sum((m**2).sum() for m in moved)))


def overflow_on(overflowing_row: int | None, devices: int = 1) -> dict:
    """Trains three steps in float16; in the second, one row's gradients overflow."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(36)
    weights = np.ones(36, "float32")
    if overflowing_row is not None:
        weights[12 + overflowing_row] = 1e6
    strategy = rank_job.strategy(devices)
    model = compiled(strategy, optimizer=InScope(keras.optimizers.Adam, 0.01))
    result = {"steps": []}
    for begin in range(0, 36, 12):
        rows = slice(begin, begin + 12)
        model.train_on_batch(x[rows], y[rows], weights[rows])
        result["steps"].append(
            {
                "weights": [v.numpy() for v in model.trainable_weights],
                "scale": float(model.optimizer.dynamic_scale.numpy()),
                "iterations": int(model.optimizer.iterations.numpy()),
            }
        )
    return result


def batch_logs() -> list[dict]:
    """Returns the logs that callbacks get after each batch and after the epoch."""
    x, y = data(50)
    model = compiled(rank_job.strategy())
    logs: list[dict] = []

    def remember(step, logs_of_step):
        logs.append({k: float(v) for k, v in logs_of_step.items()})

    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: remember(batch, logs),
        on_epoch_end=lambda epoch, logs: remember(epoch, logs),
    )
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0, callbacks=[keep])
    return logs


def metric_read_by_the_chief_alone() -> float | None:
    """Rank 0 reads a metric after `fit`; the others do not."""
    x, y = data(32)
    strategy = rank_job.strategy()
    model = compiled(strategy)
    model.fit(x, y, batch_size=16, verbose=0)
    return float(model.metrics[0].result()) if strategy.is_chief else None


def moving_statistics() -> dict:
    """Returns BatchNormalization's moving mean and variance after a step on 7 rows."""
    x, _ = data(7)
    with rank_job.strategy().scope():
        seed_ranks_apart()
        norm = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([layers.Input((6,)), norm])
        model.compile("sgd", "mse")
    model.train_on_batch(x, x)
    return {"mean": norm.moving_mean.numpy(), "variance": norm.moving_variance.numpy()}


def identity() -> tuple:
    """Returns the strategy's properties on this rank."""
    strategy = rank_job.strategy()
    context = []
    strategy.distribute_datasets_from_function(
        lambda c: (
            context.append((c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync))
            or tf.data.Dataset.range(1)
        )
    )
    return (strategy.rank, strategy.size, strategy.is_chief, context[0])


def wrong_use(kind: str) -> str:
    """Misuses the library; returns the warning, or raises the error."""
    x, y = data(32)
    strategy = rank_job.strategy()
    model = compiled(strategy)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    if kind == "sharded dataset":
        model.fit(dataset.shard(strategy.size, strategy.rank).batch(4), verbose=0)
    elif kind == "loop shuffles without a seed":
        from tensorflow.python.eager import context

        context.context()._seed = None  # As in a process without a seed.
        strategy.experimental_distribute_dataset(dataset.shuffle(32).batch(4))
    elif kind == "model made outside":
        model = dense_model()
        model.compile("sgd", "sparse_categorical_crossentropy")
        with strategy.scope():
            model.fit(x, y, verbose=0)
    elif kind == "compiled inside":
        model = dense_model()
        with strategy.scope():
            model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(x, y, verbose=0)
    elif kind == "forgotten scope":
        model = dense_model()
        model.compile("sgd", "sparse_categorical_crossentropy")
        with tfdml.alone():
            model.fit(x, y, verbose=0)
        model.predict(x, verbose=0)
        model.fit(x, y, verbose=0)
    elif kind == "model built outside":
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(3)])
            model.compile("sgd", "sparse_categorical_crossentropy")
        model.build((None, 6))
        model.fit(x, y, verbose=0)
    elif kind == "other seeds":
        tf.random.set_seed(strategy.rank)
        model.fit(dataset.shuffle(32).batch(4), verbose=0)
    elif kind == "other arrays":
        model.fit(x[strategy.rank :: 2], y[strategy.rank :: 2], verbose=0)
    elif kind == "horovod optimizer":
        import horovod.tensorflow.keras as hvd

        # `DistributedOptimizer` itself fails with Keras 3: any object of a Horovod class will do.
        model.optimizer = hvd.callbacks.MetricAverageCallback()
        model.fit(x, y, verbose=0)
    elif kind == "horovod callback":
        import horovod.tensorflow.keras as hvd

        model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
    elif kind == "optimizer made outside":
        optimizer = keras.optimizers.SGD()
        optimizer.apply([np.ones(1)], [keras.Variable([1.0])])
        with strategy.scope():
            model.compile(optimizer, "sparse_categorical_crossentropy")
        model.fit(x, y, verbose=0)
    elif kind == "distributed from function":
        given = strategy.distribute_datasets_from_function(lambda context: dataset.batch(4))
        model.fit(given, verbose=0)
    elif kind == "distributed by another":
        other = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        model.fit(other.experimental_distribute_dataset(dataset.batch(4)), verbose=0)
    elif kind == "an iterator":
        distributed = strategy.experimental_distribute_dataset(dataset.batch(4))
        model.fit(iter(distributed), verbose=0, steps_per_epoch=1)
    return ""


def warnings_of_multiplied_rate(with_horovod: bool) -> str:
    """Trains at Adam's default rate times the number of ranks; returns the warnings.

    Args:
        with_horovod: Whether the code has imported Horovod, as scripts written for it do.
    """
    if with_horovod:
        import horovod.tensorflow as hvd  # noqa: F401
    strategy = rank_job.strategy()
    x, y = data(24)
    rate = 0.001 * strategy.size
    model = compiled(strategy, optimizer=InScope(keras.optimizers.Adam, rate))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, verbose=0)
    return "\n".join(str(w.message) for w in caught)


def alone_and_together() -> dict:
    """A local model of this process, trained before and after a distributed model."""
    strategy = rank_job.strategy()
    x, y = data(53)
    keras.utils.set_random_seed(11)
    own = dense_model()
    own.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with tfdml.alone():
        before = fitted(own, x, y, validation_data=(x, y))
    together = fitted(compiled(strategy), x, y)
    keras.utils.set_random_seed(12)
    with tfdml.alone():
        after = fitted(own, x, y, validation_data=(x, y))
    parts = {"before": before, "together": together, "after": after}
    return {
        "weights": [w for part in parts.values() for w in part["weights"]],
        "history": {
            f"{name} {log}": values
            for name, part in parts.items()
            for log, values in part["history"].items()
        },
    }


def overflow_counts(row: int) -> dict:
    """Returns the loss scale and the number of steps after each step of `overflow_on`."""
    steps = overflow_on(row)["steps"]
    return {"weights": [np.array([step["scale"], step["iterations"]]) for step in steps]}


def dropout_masks() -> list[np.ndarray]:
    """Returns the dropout masks that this process's replicas drew in two steps."""
    seed_ranks_apart()
    strategy = rank_job.strategy()
    masks = []

    def remember(outputs):
        masks.append(outputs != 0)

    class Spy(layers.Layer):
        def call(self, inputs):
            tf.numpy_function(remember, [inputs], [])
            return inputs

    with strategy.scope():
        model = keras.Sequential([layers.Input((64,)), layers.Dropout(0.5), Spy(), layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = strategy.num_replicas_in_sync
    x = np.ones((2 * rows, 64), "float32")
    model.fit(x, x[:, :1], batch_size=rows, epochs=1, shuffle=False, verbose=0)
    return masks


def distinct_masks() -> dict:
    """Returns whether all masks drawn by the replicas differ."""
    masks = np.concatenate(dropout_masks())
    gathered = rank_job.strategy().extended.collective.all_gather(
        tf.constant(np.packbits(masks, 1)), "masks"
    )
    return {"weights": [], "distinct": len(np.unique(gathered, axis=0)) == len(gathered)}
