"""Checks sharded input: the row counts seen in a pipeline, and the resulting local batches."""

import numpy as np
import pytest
import tensorflow as tf

from tfdml.collectives.simulated import run_ranks
from tfdml.strategies.input import sharded_input
from tfdml.strategies.input.feed_modes import ShardedFeed
from tfdml.strategies.input.local_batch import BatchSplitter
from tfdml.strategies.input.sharded_input import ENDLESS, UNKNOWN, known_rows, sharded_batches

RANGE = tf.data.Dataset.range(100)


@pytest.mark.parametrize(
    ("dataset", "rows"),
    [
        (RANGE.batch(8), 100),
        (RANGE.batch(8, drop_remainder=True), 96),
        (RANGE.batch(8, num_parallel_calls=2), 100),
        (RANGE.padded_batch(8), 100),
        (RANGE.shard(3, 1).shuffle(5).batch(8).cache().prefetch(2), 33),
        (RANGE.batch(8).with_options(tf.data.Options()), 100),
        (RANGE.repeat(2).batch(8), 200),
        (RANGE.batch(8).repeat(), ENDLESS),
        (RANGE.batch(8).map(lambda x: tf.concat([x, x], 0)), UNKNOWN),
        (RANGE.filter(lambda x: x % 2 == 0).batch(8), UNKNOWN),
        (RANGE.batch(8).unbatch(), UNKNOWN),
    ],
)
def test_row_count_is_derived_from_the_pipeline(dataset, rows):
    assert known_rows(dataset) == rows


def _batches(lengths, batch_size, change=lambda dataset: dataset, take=-1):
    """Returns each rank's local batches; its shard has some rows, numbered from 1000 x rank."""

    def read(collective):
        rank = collective.rank
        rows = np.arange(1000 * rank, 1000 * rank + lengths[rank])
        dataset = change(tf.data.Dataset.from_tensor_slices(rows).batch(batch_size))
        splitter = BatchSplitter(rank, 1, collective.size)
        local_batches, number = sharded_batches(dataset, collective, splitter)
        feed = isinstance(local_batches, ShardedFeed)
        # A dropped feed waits for the other ranks' iterators, so each is read to its end.
        found = list(local_batches) if feed else list(local_batches.take(take))
        return number, feed, found

    return run_ranks(len(lengths), read)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "number", "feed"),
    [
        ([20, 20], 8, 5, False),
        ([20, 17], 8, 5, False),  # The same number of batches, the last with 4 + 1 rows.
        ([20, 16], 8, 5, True),  # 5 and 4 batches: rank 1 ends earlier.
        ([14, 14, 9], 8, 5, False),  # Shares of 3, 3 and 2 rows.
        ([9, 9, 9], 8, 5, True),  # 3, 3 and 5 batches.
        ([2, 1], 8, 1, False),
    ],
)
def test_every_row_comes_once_with_the_global_row_count(lengths, batch_size, number, feed):
    results = _batches(lengths, batch_size)
    assert [r[:2] for r in results] == [(number, feed)] * len(lengths)
    for rank, (_, _, local_batches) in enumerate(results):
        rows = np.concatenate([p.parts[0][: p.rows[0]] for p in local_batches])
        assert rows.tolist() == list(range(1000 * rank, 1000 * rank + lengths[rank]))
    for local_batches in zip(*(found for *_, found in results), strict=True):
        rows = [int(p.rows[0]) for p in local_batches]
        assert [int(p.global_rows) for p in local_batches] == [sum(rows)] * len(rows)


def test_infinite_shards_yield_full_batches():
    results = _batches([10, 7], 4, lambda dataset: dataset.repeat(), take=20)
    for number, feed, local_batches in results:
        assert (number, feed) == (None, False)
        assert [int(p.global_rows) for p in local_batches] == [4] * 20
        assert [len(p.parts[0]) for p in local_batches] == [2] * 20


def test_unknown_row_count_on_one_rank_makes_all_agree_per_batch():
    def read(collective):
        dataset = tf.data.Dataset.range(8)
        if collective.rank:
            dataset = dataset.filter(lambda x: True)
        splitter = BatchSplitter(collective.rank, 1, 2)
        local_batches, number = sharded_batches(dataset.batch(4), collective, splitter)
        return isinstance(local_batches, ShardedFeed), number, len(list(local_batches))

    assert run_ranks(2, read) == [(True, None, 4)] * 2


def test_deviating_row_count_is_an_error(monkeypatch):
    monkeypatch.setattr(sharded_input, "known_rows", lambda dataset: 7)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="as many rows as their pipeline declares"
    ):
        _batches([8, 8], 4)


def test_replica_can_have_no_rows_of_the_last_batch():
    def read(collective):
        dataset = tf.data.Dataset.range(9).batch(8)
        splitter = BatchSplitter(2 * collective.rank, 2, 4)
        local_batches, _ = sharded_batches(dataset, collective, splitter)
        return [(p.rows.numpy().tolist(), int(p.global_rows)) for p in local_batches]

    assert run_ranks(2, read) == [[([2, 2], 8), ([2, 2], 8), ([1, 0], 2)]] * 2
