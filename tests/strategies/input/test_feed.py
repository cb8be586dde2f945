"""Checks feeds: their batches and the time of errors, in one process and on simulated ranks."""

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from tfdml.collectives.collective import LocalCollective
from tfdml.collectives.simulated import run_ranks
from tfdml.runtime.errors import DataError, OtherRankError
from tfdml.strategies.input.feed_modes import ReplicatedFeed, ScatterFeed, ShardedFeed
from tfdml.strategies.input.local_batch import BatchSplitter

ONE = BatchSplitter(0, 1, 1)


def _feed(mode, dataset):
    if mode is not ScatterFeed:
        dataset = dataset.map(ONE.split)
    return mode(dataset, LocalCollective(), ONE, None)


def _rows(feed):
    return [p.parts[0][: p.rows[0]].numpy().tolist() for p in feed]


# Batches are agreed on 1, 2, 4 and then 8 at a time: the ends fall within and between.
@pytest.mark.parametrize("batches", [1, 2, 3, 6, 7, 8, 15, 20])
@pytest.mark.parametrize("mode", [ReplicatedFeed, ScatterFeed, ShardedFeed])
def test_every_batch_comes_once_and_in_order(mode, batches):
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
    local_batches = iter(feed)
    assert [float(next(local_batches).parts[0][0]) for _ in range(good)] == list(range(good))
    with pytest.raises(DataError, match=f"on rank 0, instead of batch {good}: .*file is gone"):
        next(local_batches)


def _failing(feed: type, failing: int, collective) -> tuple[int, Exception | None]:
    """Reads batches until one rank's data fail; returns the number of batches, and the error."""

    def batches() -> Iterator[np.ndarray]:
        for _ in range(3):
            yield np.ones((4, 2), "float32")
        if collective.rank == failing:
            raise OSError("the file is gone")
        yield np.ones((4, 2), "float32")

    spec = tf.TensorSpec((None, 2))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    if feed is ShardedFeed:
        dataset = dataset.map(ONE.split)
    splitter = BatchSplitter(collective.rank, 1, collective.size)
    came = 0
    try:
        for _ in feed(dataset, collective, splitter, None):
            came += 1
    except (OtherRankError, DataError) as error:
        return came, error
    return came, None


@pytest.mark.parametrize(("feed", "failing"), [(ScatterFeed, 0), (ShardedFeed, 1)])
def test_data_that_fail_on_one_rank_are_an_error_on_all(feed, failing):
    results = run_ranks(3, lambda collective: _failing(feed, failing, collective))
    assert [came for came, _ in results] == [3, 3, 3]
    for rank, (_, error) in enumerate(results):
        if rank == failing:
            assert "OSError: the file is gone" in str(error)
        else:
            assert isinstance(error, OtherRankError)
            assert f"an error on rank {failing} instead of batch 3" in str(error)
            assert f"so rank {rank} ends too" in str(error)
