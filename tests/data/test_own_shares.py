"""Checks each process's rows of every global batch, from a pipeline and from its stages."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.data.conftest import records
from tfdml.collectives.simulated import run_ranks
from tfdml.data import TFRecordPipeline, read_tfrecords, write_tfrecords
from tfdml.row_split import LocalReplicas, OwnShareDataset
from tfdml.strategies.input.local_batch import BatchSplitter
from tfdml.strategies.input.sharded_input import _visible_batch_size, sharded_batches

SAMPLES, BATCH, RANKS = 100, 12, 2
OFF = tf.data.Options()
OFF.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("own"))
    write_tfrecords(records(SAMPLES), path, shards=1)
    return path


@pytest.fixture(scope="module")
def pipelines(directory) -> list[TFRecordPipeline]:
    """Returns each rank's pipeline, whose epochs all have the same order."""
    return [read(directory, rank, reshuffle=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def plain(pipelines) -> list[tf.data.Dataset]:
    """Returns the same rows from plain `tf.data`, batched by the global size."""
    steps = [pipelines[0].ids(0, step) for step in range(pipelines[0].steps_per_epoch)]
    own = [np.concatenate([np.array_split(ids, RANKS)[rank] for ids in steps]) for rank in (0, 1)]
    slices = tf.data.Dataset.from_tensor_slices
    return [slices(rows).batch(BATCH).with_options(OFF) for rows in own]


def read(directory: str, rank: int, ranks: int = RANKS, **options) -> TFRecordPipeline:
    # A pipeline needs only the rank and size from a strategy.
    strategy = SimpleNamespace(num_replicas_in_sync=ranks, size=ranks, rank=rank)
    return read_tfrecords(directory, BATCH, features=["id"], seed=5, strategy=strategy, **options)


def steps_of(datasets: list[tf.data.Dataset]) -> tuple[list, list]:
    """Returns each rank's rows and global row count per step, and the numbers of steps."""

    def of_rank(collective):
        splitter = BatchSplitter(collective.rank, 1, collective.size)
        local_batches, number = sharded_batches(datasets[collective.rank], collective, splitter)
        rows = [
            (p.parts[0][: p.rows[0]].numpy().tolist(), int(p.global_rows)) for p in local_batches
        ]
        return rows, number

    rows, numbers = zip(*run_ranks(RANKS, of_rank), strict=True)
    return list(rows), list(numbers)


def concatenated(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    return dataset.concatenate(tf.data.Dataset.range(30).batch(batch_size))


# Stages that users may add to a pipeline, with the batch size seen then, None if unknown.
STAGES = {
    "options": (lambda d: d.with_options(tf.data.Options()), BATCH),
    "prefetch": (lambda d: d.prefetch(2), BATCH),
    "cache": (lambda d: d.cache(), BATCH),
    "take": (lambda d: d.take(3), BATCH),
    "skip": (lambda d: d.skip(1), BATCH),
    "shard": (lambda d: d.shard(2, 1), BATCH),
    "filter": (lambda d: d.filter(lambda x: True), BATCH),
    "shuffle": (lambda d: d.shuffle(3, seed=1), BATCH),
    "repeat": (lambda d: d.repeat(), BATCH),
    "assert": (lambda d: d.apply(tf.data.experimental.assert_cardinality(5)), BATCH),
    "zip": (lambda d: tf.data.Dataset.zip(d, d.skip(0)), BATCH),
    "concatenate": (lambda d: concatenated(d, BATCH), BATCH),
    "several": (lambda d: d.cache().skip(1).repeat(2).prefetch(2), BATCH),
    "batch": (lambda d: d.unbatch().batch(8), 8),
    "two sizes": (lambda d: concatenated(d, 8), None),
    "map": (lambda d: d.map(lambda x: x), None),
    "unbatch": (lambda d: d.unbatch(), None),
    "rebatch": (lambda d: d.rebatch(8), None),
    "enumerate": (lambda d: d.enumerate(), None),
    "window": (lambda d: d.window(2), None),
    "flat_map": (lambda d: d.flat_map(tf.data.Dataset.from_tensors), None),
}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_report_the_batch_size_of_plain_batches(pipelines, plain, stage):
    change, size = STAGES[stage]
    for datasets in (plain, pipelines):
        assert _visible_batch_size(change(datasets[0])) == size


@pytest.mark.parametrize("stage", ["prefetch", "several", "batch"])
def test_rows_of_each_step_equal_plain_batches(pipelines, plain, stage):
    change, _ = STAGES[stage]
    (found, _), (wanted, _) = (steps_of([change(d) for d in data]) for data in (pipelines, plain))
    assert found == wanted
    assert len(found[0]) == len(found[1]) > 2


def test_pipeline_reports_its_steps(pipelines, plain):
    assert steps_of(pipelines) == steps_of(plain)
    assert steps_of(pipelines)[1] == [pipelines[0].steps_per_epoch] * RANKS


def test_batches_of_unknown_size_are_refused(pipelines):
    with pytest.raises(ValueError, match=r"must end in `batch\(n\)`.*no visible batch size"):
        steps_of([pipeline.map(lambda x: x) for pipeline in pipelines])


def test_whole_batches_are_not_treated_as_own_shares(directory):
    whole = read(directory, 0, 1).with_options(OFF)
    with pytest.raises(ValueError, match=r"must end in `batch\(n\)`.*no visible batch size"):
        steps_of([whole, whole])


def test_iterating_by_hand_yields_own_rows_in_global_batch_sizes(pipelines, plain):
    for pipeline, groups in zip(pipelines, plain, strict=True):
        rows = [group.numpy().tolist() for group in groups]
        assert [group.numpy().tolist() for group in pipeline] == rows
        assert [len(group) for group in rows[:-1]] == [BATCH] * (len(rows) - 1)


def test_resumed_pass_with_a_rank_without_rows_in_the_last_batch(directory, pipelines):
    state = {**pipelines[0].state_at(0, 0), "sample": SAMPLES - 1 - 2 * BATCH}
    resumed = [read(directory, rank, reshuffle=False, state=state) for rank in range(RANKS)]
    (first, second), _ = steps_of(resumed)
    assert [(len(rows), total) for rows, total in first] == [(6, 12), (6, 12), (1, 1)]
    assert [(len(rows), total) for rows, total in second] == [(6, 12), (6, 12), (0, 1)]
    used = [row for rows, _ in first + second for row in rows]
    assert len(set(used)) == len(used) == 2 * BATCH + 1


def test_shares_are_the_rows_read_without_regrouping(pipelines):
    """The protocol: strategies ask for the rows that were read, with the length of an epoch."""
    for rank, pipeline in enumerate(pipelines):
        assert isinstance(pipeline, OwnShareDataset)
        assert pipeline.global_batch_size == BATCH
        shares, steps = pipeline.local_shares(LocalReplicas(rank, 1, RANKS))
        assert (shares, steps) == (pipeline._shares, pipeline.steps_per_epoch)
        # Other replicas' rows cannot be read: this rank's are regrouped in batches of another size.
        other, steps = pipeline.local_shares(LocalReplicas(rank, 1, 4))
        assert ([len(batch) for batch in other.take(2)], steps) == ([3, 3], None)
