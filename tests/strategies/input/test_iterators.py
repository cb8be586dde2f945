"""Checks that ending a pass over a dataset does not wait for its resources to be freed."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfdml.collectives.collective import LocalCollective
from tfdml.strategies import HorovodStrategy
from tfdml.strategies.input.device_prefetch import DevicePrefetcher
from tfdml.strategies.input.feed_modes import ReplicatedFeed
from tfdml.strategies.input.iterators import Reiterable
from tfdml.strategies.input.local_batch import BatchSplitter
from tfdml.strategies.keras_seam.data.data_source import OneByOne

ONE = BatchSplitter(0, 1, 1)
SECONDS = 20


class Held:
    """Infinite data whose iterator is not freed before it is allowed to be."""

    def __init__(self):
        self.may, self.free = threading.Event(), threading.Event()
        spec = tf.TensorSpec([4, 3], tf.float32)
        self.dataset = tf.data.Dataset.from_generator(self._batches, output_signature=spec)

    def _batches(self):
        try:
            while True:
                yield np.ones([4, 3], "float32")
        finally:
            self.may.wait(SECONDS)
            self.free.set()

    def check(self) -> None:
        """Checks that the unreferenced iterator is freed once it is allowed to be."""
        assert not self.free.is_set()
        self.may.set()
        assert self.free.wait(SECONDS)


def fit(data, **arguments) -> None:
    with HorovodStrategy().scope():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(data.map(lambda x: (x, x)), verbose=0, **arguments)


@pytest.mark.parametrize(
    "kind",
    [
        Reiterable,
        OneByOne,
        lambda d: ReplicatedFeed(d.map(ONE.split), LocalCollective(), ONE, None),
        lambda d: DevicePrefetcher(d.map(ONE.split), ["CPU:0"]),
    ],
    ids=["dataset", "one by one", "feed", "on devices"],
)
def test_a_pass_ends_without_waiting(kind):
    held = Held()
    for _ in kind(held.dataset):
        break
    held.check()


def test_fit_ends_without_waiting():
    held = Held()
    fit(held.dataset, steps_per_epoch=2)
    held.check()


def test_the_next_epoch_begins_without_waiting():
    held = Held()
    begun = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: begun.append(held.free.is_set()))
    known = held.dataset.apply(tf.data.experimental.assert_cardinality(3))
    fit(known, epochs=3, callbacks=[note])
    assert begun == [False] * 3
    held.check()
