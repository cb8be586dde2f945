"""Feeds on simulated ranks: what each rank says when the data of one of them fail."""

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from tfdml.collectives.simulated import run_ranks
from tfdml.runtime.errors import OtherRankError
from tfdml.strategies.feed import ScatterFeed, ShardedFeed
from tfdml.strategies.share import Splitter


def _read(feed: type, failing: int, collective) -> tuple[int, Exception | None]:
    """Reads batches until one rank's data fail; returns how many came, and the error."""

    def batches() -> Iterator[np.ndarray]:
        for _ in range(3):
            yield np.ones((4, 2), "float32")
        if collective.rank == failing:
            raise OSError("the file is gone")
        yield np.ones((4, 2), "float32")

    spec = tf.TensorSpec((None, 2))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    splitter = Splitter(collective.rank, 1, collective.size)
    came = 0
    try:
        for _ in feed(dataset, collective, splitter, None):
            came += 1
    except (OtherRankError, tf.errors.OpError) as error:
        return came, error
    return came, None


@pytest.mark.parametrize(("feed", "failing"), [(ScatterFeed, 0), (ShardedFeed, 1)])
def test_data_that_fail_on_one_rank_are_an_error_on_all(feed, failing):
    results = run_ranks(3, lambda collective: _read(feed, failing, collective))
    assert [came for came, _ in results] == [3, 3, 3]
    for rank, (_, error) in enumerate(results):
        if rank == failing:
            assert "OSError: the file is gone" in str(error)
        else:
            assert isinstance(error, OtherRankError)
            assert f"an error on rank {failing} instead of batch 3" in str(error)
            assert f"so rank {rank} ends too" in str(error)
