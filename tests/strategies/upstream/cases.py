"""Cases run by ranks: Keras 3 without tfdml, on the models and data of the other cases."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import data, dense_model
from tests.strategies.contract.training_cases import Recorder


def _mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _fitted(
    strategy: tf.distribute.Strategy | None, make_optimizer, x, y, batch: int, weights=None
) -> keras.Model:
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        keras.utils.set_random_seed(11)
        model = dense_model()
        model.compile(
            make_optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    model.fit(x, y, sample_weight=weights, batch_size=batch, epochs=3, shuffle=False, verbose=0)
    return model


def clipped_update_norm() -> float:
    """`MirroredStrategy` on 2 replicas: norm of a step with `global_clipnorm=1` and rate 1."""
    x, y = data(24)
    with _mirrored().scope():
        keras.utils.set_random_seed(11)
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1.0, global_clipnorm=1.0), loss)
    before = [v.numpy() for v in model.trainable_weights]
    # The same rows twice: both replicas have the same gradient.
    model.fit(
        np.repeat(x[:1] * 100, 24, 0), np.repeat(y[:1], 24, 0), batch_size=24, epochs=1, verbose=0
    )
    moved = [v.numpy() - b for v, b in zip(model.trainable_weights, before, strict=True)]
    return float(np.sqrt(sum((m**2).sum() for m in moved)))


def uneven_batches() -> float:
    """`MirroredStrategy` on 2 replicas: difference of uneven batches from one replica."""
    x, y = data(33)
    one, two = (
        _fitted(strategy, lambda: keras.optimizers.SGD(0.5), x, y, 10)
        for strategy in (None, _mirrored())
    )
    return max(
        float(np.abs(a.numpy() - b.numpy()).max())
        for a, b in zip(one.weights, two.weights, strict=True)
    )


def overflow_on_the_second_replica() -> bool:
    """`MirroredStrategy` in float16: whether the weights are finite after an overflow."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(24)
    weights = np.ones(24, "float32")
    weights[20] = 1e6
    model = _fitted(_mirrored(), lambda: keras.optimizers.SGD(0.1), x, y, 24, weights)
    return all(np.isfinite(v.numpy()).all() for v in model.trainable_weights)


def seeded_orders() -> bool:
    """Plain `fit(shuffle=True)` after `set_random_seed`: whether two epochs have the same order."""
    keras.utils.set_random_seed(3)
    ids = np.arange(96, dtype="float32")[:, None]
    recorder = Recorder()
    model = keras.Sequential([layers.Input((1,)), recorder, layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(ids, ids, batch_size=12, epochs=2, verbose=0)
    seen = [i for batch in recorder.seen for i in batch]
    return seen[:96] == seen[96:]


def samples_without_agreement() -> list[int]:
    """Samples of this Horovod rank with plain `fit` of 1/N of the steps."""
    import horovod.tensorflow as hvd

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    ids = np.arange(96, dtype="float32")[:, None]
    recorder = Recorder()
    model = keras.Sequential([layers.Input((1,)), recorder, layers.Dense(1)])
    model.compile("sgd", "mse")
    # Other cases of this process may have left a strategy without its scope.
    with tfdml.alone():
        model.fit(ids, ids, batch_size=12, epochs=1, steps_per_epoch=8 // hvd.size(), verbose=0)
    return [i for batch in recorder.seen for i in batch]


def horovod_optimizer(broadcast: bool) -> list[np.ndarray]:
    """`hvd.DistributedOptimizer` in `fit`, as its documentation says; returns this rank's weights.

    Args:
        broadcast: Whether Horovod's callback broadcasts the initial weights; else all ranks have
            the same seed, and need none.
    """
    import horovod.tensorflow.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(11)
    x, y = data(48)
    model = dense_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if broadcast else []
    own = slice(hvd.rank(), None, hvd.size())
    with tfdml.alone():
        model.fit(x[own], y[own], batch_size=12, shuffle=False, verbose=0, callbacks=callbacks)
    return [v.numpy() for v in model.weights]


def multi_worker_fit() -> None:
    """`fit` under TensorFlow's own `MultiWorkerMirroredStrategy`, on the workers of this job."""
    from tfdml.strategies import cluster_member

    rank_job.strategy()  # Starts the server; the strategy is TensorFlow's.
    (member,) = cluster_member._members.values()
    x, y = data(24)
    _fitted(member.server, lambda: keras.optimizers.SGD(0.1), x, y, 12)


def gradient_accumulation() -> None:
    """`MirroredStrategy` with `gradient_accumulation_steps`."""
    x, y = data(24)
    make = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    _fitted(_mirrored(), make, x, y, 12)


def row_used_twice(dense: bool) -> list[float]:
    """Position of a row after two steps of Adam, rate 0.1, whose gradient comes in two parts."""
    row = keras.Variable(np.zeros((1, 2), "float32"))
    optimizer = keras.optimizers.Adam(0.1)
    parts = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, -1.0]]), tf.constant([0, 0]), (1, 2))
    for _ in range(2):
        optimizer.apply([tf.convert_to_tensor(parts) if dense else parts], [row])
    return row.numpy()[0].tolist()
