"""Cases run by ranks on two hosts: gradients are summed within hosts before they are encoded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import keras
import tensorflow as tf
from keras import layers

from tests.compression import training_cases
from tests.harness import rank_job
from tests.strategies.cases import data, outcome, seed_ranks_apart
from tfdml import compression
from tfdml.callbacks import FaultTolerantCheckpoint
from tfdml.compression.exchange import compressed_aggregator
from tfdml.compression.exchange.way_choice import is_faster_by_hosts


@contextlib.contextmanager
def way(by_hosts: bool) -> Iterator[None]:
    """Context manager: strategies sum in this way, whichever is faster on this machine."""
    with mock.patch.object(compressed_aggregator, "is_faster_by_hosts", return_value=by_hosts):
        yield


def train(compressor: str, by_hosts: bool = True) -> dict:
    """Trains as `training_cases.train`."""
    with way(by_hosts):
        return training_cases.train(compressor)


def train_with(compressor: str, options: dict) -> dict:
    """Trains as `training_cases.train` with some options."""
    with way(True):
        return training_cases.train(compressor, **options)


def measured() -> tuple:
    """Returns the hosts that the strategy sees, and what it measures."""
    strategy = rank_job.strategy(compression="int8")
    hosts = strategy.extended.aggregator_choice.hosts
    codec = compression.QSGD(8)
    faster = is_faster_by_hosts(strategy.extended.collective, hosts, codec, [(64, 64)])
    return hosts.ranks, faster


def measured_hosts() -> tuple:
    """Returns the hosts that the strategy sees."""
    return rank_job.strategy().extended.aggregator_choice.hosts.ranks


def resumed(directory: str, epochs: int) -> dict:
    """Trains with checkpoints; a second call continues where the first one ended."""
    x, y = data(33)
    # TensorFlow's own generator belongs to the strategy of the case that used it first.
    tf.random.set_global_generator(tf.random.Generator.from_seed(1))
    with way(True), rank_job.strategy(compression="int4").scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(400, activation="relu"), layers.Dense(5)]
        )
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        checkpoint = FaultTolerantCheckpoint(Path(directory), save_freq=2)
        history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[checkpoint])
    return outcome(model, history)
