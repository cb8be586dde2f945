"""Cases run by ranks: strategies created with TensorFlow's arguments."""

import keras
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import data, outcome

CROSS_DEVICE_OPS = {
    "one_device": tf.distribute.ReductionToOneDevice,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
}


def all_reduced(name: str | None) -> dict:
    """Trains an embedding and dense layers with one of TensorFlow's cross-device operations."""
    x, y = data(37)
    ids = (abs(x) * 10).astype("int64") % 20
    options = {"cross_device_ops": CROSS_DEVICE_OPS[name]()} if name else {}
    with rank_job.strategy(**options).scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [layers.Input((6,)), layers.Embedding(20, 4), layers.Flatten(), layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss, metrics=["accuracy"])
    return outcome(model, model.fit(ids, y, batch_size=8, epochs=2, verbose=0))


def summed_hierarchically() -> list[float]:
    """Returns the sum of 1, 2 and 3 by TensorFlow's strategy, on each of three devices."""
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(3)], cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
    )

    @tf.function
    def summed():
        def step():
            replica = tf.distribute.get_replica_context()
            return replica.all_reduce("SUM", float(replica._local_replica_id + 1))

        return strategy.run(step)

    return [float(value) for value in strategy.experimental_local_results(summed())]
