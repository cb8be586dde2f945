"""Feeds of one process: what they yield, and when an error comes."""

import numpy as np
import pytest
import tensorflow as tf

from tfdml.collectives.collective import LocalCollective
from tfdml.runtime.errors import DataError
from tfdml.strategies.feed_modes import ReplicatedFeed, ScatterFeed, ShardedFeed
from tfdml.strategies.share import Splitter

ONE = Splitter(0, 1, 1)


def _feed(mode, dataset):
    if mode is not ScatterFeed:
        dataset = dataset.map(ONE.split)
    return mode(dataset, LocalCollective(), ONE, None)


def _rows(feed):
    return [p.parts[0][: p.rows[0]].numpy().tolist() for p in feed]


# Batches are agreed on 1, 2, 4 and then 8 at a time: the ends fall in and between.
@pytest.mark.parametrize("batches", [0, 1, 2, 3, 6, 7, 8, 15, 20])
@pytest.mark.parametrize("mode", [ReplicatedFeed, ScatterFeed, ShardedFeed])
def test_every_batch_comes_once_and_in_order(mode, batches):
    if mode is ShardedFeed and batches == 0:
        pytest.skip("a rank without a part is an error")
    data = np.arange(3 * batches, dtype="float32").reshape(batches, 3)
    feed = _feed(mode, tf.data.Dataset.from_tensor_slices(data))
    assert _rows(feed) == data.tolist()
    assert _rows(feed) == data.tolist()


@pytest.mark.parametrize("good", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("mode", [ReplicatedFeed, ScatterFeed, ShardedFeed])
def test_an_error_comes_after_the_batches_before_it(mode, good):
    def batches():
        for number in range(good):
            yield np.full([2], number, "float32")
        raise OSError("the file is gone")

    spec = tf.TensorSpec([None], tf.float32)
    feed = _feed(mode, tf.data.Dataset.from_generator(batches, output_signature=spec))
    portions = iter(feed)
    assert [float(next(portions).parts[0][0]) for _ in range(good)] == list(range(good))
    with pytest.raises(DataError, match=f"on rank 0, instead of batch {good}: .*file is gone"):
        next(portions)
