"""Each process's rows of every global batch: by the pipeline's own word, and by its stages."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.data.conftest import records
from tfdml.collectives.simulated import run_ranks
from tfdml.data import TFRecordPipeline, read_tfrecords, write_tfrecords
from tfdml.strategies.own_parts import own_portions
from tfdml.strategies.share import Splitter

SAMPLES, BATCH, RANKS = 100, 12, 2
OFF = tf.data.Options()
OFF.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("own"))
    write_tfrecords(records(SAMPLES), path, shards=1)
    return path


def read(directory: str, rank: int, ranks: int = RANKS, **options) -> TFRecordPipeline:
    # A process's place in a job is all that a pipeline asks of a strategy.
    place = SimpleNamespace(num_replicas_in_sync=ranks, size=ranks, rank=rank)
    return read_tfrecords(directory, BATCH, features=["id"], seed=5, strategy=place, **options)


def plain(directory: str, rank: int) -> tf.data.Dataset:
    """Returns the same rows as `tf.data` alone yields them, batched by the global size."""
    whole = read(directory, rank)
    own = [np.array_split(whole.ids(0, step), RANKS)[rank] for step in range(whole.steps_per_epoch)]
    return tf.data.Dataset.from_tensor_slices(np.concatenate(own)).batch(BATCH).with_options(OFF)


def rows_of_steps(make) -> list:
    """Returns for each rank the rows of each step, and those of all ranks then."""

    def of_rank(collective):
        splitter = Splitter(collective.rank, 1, collective.size)
        portions, _ = own_portions(make(collective.rank), collective, splitter)
        return [(p.parts[0][: p.rows[0]].numpy().tolist(), int(p.global_rows)) for p in portions]

    return run_ranks(RANKS, of_rank)


# Stages that yield the batches they are given, whose size the strategy finds in front of them.
KEPT = {
    "none": lambda dataset: dataset,
    "options": lambda dataset: dataset.with_options(tf.data.Options()),
    "prefetch": lambda dataset: dataset.prefetch(2),
    "cache": lambda dataset: dataset.cache(),
    "take": lambda dataset: dataset.take(3),
    "skip": lambda dataset: dataset.skip(1),
    "shard": lambda dataset: dataset.shard(2, 1),
    "filter": lambda dataset: dataset.filter(lambda x: True),
    "shuffle": lambda dataset: dataset.shuffle(3, seed=1),
    "repeat": lambda dataset: dataset.cache().repeat(2),
    "assert_cardinality": lambda d: d.apply(tf.data.experimental.assert_cardinality(5)),
    "concatenate": lambda dataset: dataset.concatenate(tf.data.Dataset.range(30).batch(BATCH)),
    "batch": lambda dataset: dataset.unbatch().batch(8),
    "several": lambda dataset: dataset.skip(1).prefetch(2).with_options(tf.data.Options()),
}


@pytest.mark.parametrize("stage", KEPT)
def test_the_rows_of_each_step_are_those_of_plain_batches(directory, stage):
    change = KEPT[stage]
    found = rows_of_steps(lambda rank: change(read(directory, rank)))
    assert found == rows_of_steps(lambda rank: change(plain(directory, rank)))
    assert len(found[0]) == len(found[1]) > 2


REFUSED = {
    "map": lambda dataset: dataset.map(lambda x: x),
    "unbatch": lambda dataset: dataset.unbatch(),
    "rebatch": lambda dataset: dataset.rebatch(8),
    "enumerate": lambda dataset: dataset.enumerate(),
    "two sizes": lambda dataset: dataset.concatenate(tf.data.Dataset.range(30).batch(8)),
    "read outside of the scope": None,
}


@pytest.mark.parametrize("stage", REFUSED)
def test_batches_whose_size_cannot_be_seen_are_refused(directory, stage):
    def pipeline(rank):
        if REFUSED[stage] is None:
            return read(directory, 0, 1).with_options(OFF)
        return REFUSED[stage](read(directory, rank))

    with pytest.raises(ValueError, match=r"must end in `batch\(n\)`.*no batch size that can be"):
        rows_of_steps(pipeline)


def test_by_hand_a_process_yields_its_rows_in_groups_of_the_global_size(directory):
    for rank in range(RANKS):
        pipeline, rows = read(directory, rank), [g.numpy().tolist() for g in plain(directory, rank)]
        assert [group.numpy().tolist() for group in pipeline] == rows
        assert [len(group) for group in rows[:-1]] == [BATCH] * (len(rows) - 1)


def test_a_resumed_pass_and_a_rank_without_rows_of_the_last_batch(directory):
    state = read(directory, 0).state_at(0, 2)

    def make(rank):
        return read(directory, rank, state={**state, "sample": 99 - 2 * BATCH})

    first, second = rows_of_steps(make)
    assert [len(rows) for rows, _ in first] == [6, 6, 1]
    assert [len(rows) for rows, _ in second] == [6, 6, 0]
    assert [total for _, total in first] == [12, 12, 1]
    whole = [row for pair in zip(first, second, strict=True) for rows, _ in pair for row in rows]
    assert len(set(whole)) == len(whole) == 2 * BATCH + 1
