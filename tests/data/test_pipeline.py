"""Checks pipelines in one process: positions, ends, damaged records, features, augmentation."""

import json
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data.conftest import records
from tfdml.data import read_tfrecords, write_tfrecords
from tfdml.data.format.framing import FRAME


def ids(pipeline) -> list[list[int]]:
    return [batch.numpy().tolist() for batch in pipeline]


def only_ids(manifest, **options):
    return read_tfrecords(manifest.directory, 16, features=["id"], seed=1, **options)


@pytest.mark.parametrize("compressed", [False, True])
def test_passes_are_epochs(dataset, compressed):
    pipeline = only_ids(dataset(shards=1, compressed=compressed))
    first, second = ids(pipeline), ids(pipeline)
    assert [len(batch) for batch in first] == [16] * 6 + [4]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(100))
    assert first != second
    assert [pipeline.ids(0, k).tolist() for k in range(7)] == first
    assert len(pipeline) == pipeline.steps_per_epoch == 7


def test_abandoned_pass_does_not_count_as_epoch(dataset):
    pipeline = only_ids(dataset())
    peek = next(iter(pipeline)).numpy().tolist()
    assert ids(pipeline)[0] == peek
    assert pipeline.state()["epoch"] == 1


@pytest.mark.parametrize("step", [0, 1, 5, 6, 7])
def test_resume_at_any_batch(dataset, step):
    manifest = dataset()
    whole = only_ids(manifest)
    epochs = [ids(whole), ids(whole), ids(whole)]
    state = json.loads(json.dumps(whole.state_at(1, step)))
    assert len(json.dumps(state)) < 1024
    resumed = only_ids(manifest, state=state)
    assert ids(resumed) == epochs[1][step:]
    assert ids(resumed) == epochs[2]


@pytest.mark.parametrize("option", [{"window": 7}, {"shuffle": False}, {"reshuffle": False}])
def test_state_of_another_order_is_refused(dataset, option):
    manifest = dataset()
    with pytest.raises(ValueError, match="`state` must be of a pipeline with the same data"):
        only_ids(manifest, state=only_ids(manifest, **option).state())


def test_fit_counts_only_used_batches(dataset):
    pipeline = read_tfrecords(dataset().directory, 16, features=["x"], label="y")
    seen = []
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(pipeline.state())
    )
    model.fit(pipeline, epochs=2, verbose=0, callbacks=[pipeline.callback(), note])
    positions = [(s["epoch"], s["sample"]) for s in seen]
    # After the last of seven batches it is the next epoch's start.
    steps = [(e, 16 * k) for e in (0, 1) for k in range(1, 7)]
    assert positions == [*steps[:6], (1, 0), *steps[6:], (2, 0)]
    assert (pipeline.state()["epoch"], pipeline.state()["sample"]) == (2, 0)


@pytest.mark.parametrize(("step", "begin"), [(3, (0, 3)), (7, (1, 0)), (9, (1, 2))])
def test_fit_resumes_from_a_state_in_its_epoch(dataset, step, begin):
    """Also from one after an epoch's last batch; in another epoch it would be ignored."""
    directory = dataset().directory

    def fit(state=None, stops=False, **options) -> list[dict]:
        pipeline = read_tfrecords(directory, 16, features=["x"], label="y", state=state)
        seen = []
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

        def note(batch, logs):
            seen.append(pipeline.state())
            model.stop_training = stops and len(seen) == step

        callbacks = [pipeline.callback(), keras.callbacks.LambdaCallback(on_train_batch_end=note)]
        model.fit(pipeline, epochs=2, verbose=0, callbacks=callbacks, **options)
        return seen

    whole = fit()
    state = fit(stops=True)[-1]
    assert (state["epoch"], state["sample"] // 16) == begin
    assert fit(state, initial_epoch=state["epoch"]) == whole[step:]
    if state["epoch"]:
        with pytest.raises(ValueError, match="`initial_epoch` of `fit` must be the epoch of the"):
            fit(state)


def test_fit_without_callback_advances_by_epochs(dataset):
    manifest = dataset()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pipeline = read_tfrecords(manifest.directory, 16, features=["x"], label="y")
    model.fit(pipeline, epochs=3, verbose=0)
    assert pipeline.state()["epoch"] == 3


def test_last_partial_batches(dataset):
    manifest = dataset()
    assert [len(b) for b in ids(only_ids(manifest, end="drop"))] == [16] * 6
    padded = list(only_ids(manifest, end="pad"))
    assert [len(x) for x, _, _ in padded] == [16] * 7
    weights = np.concatenate([w for _, _, w in padded])
    assert weights.tolist() == [1.0] * 100 + [0.0] * 12
    used = np.concatenate([x[w > 0] for x, _, w in padded])
    assert sorted(used) == list(range(100))


def test_features(dataset):
    pipeline = read_tfrecords(dataset(shards=1).directory, 16, label="y", shuffle=False)
    x, y = next(iter(pipeline))
    assert set(x) == {"id", "x", "text"}
    np.testing.assert_array_equal(x["x"], np.repeat(np.arange(16.0), 3).reshape(16, 3))
    np.testing.assert_array_equal(y, np.arange(16) % 4)
    assert x["text"][3] == b"row 3row 3row 3"


def test_arrays_lists_and_strings_come_back(tmp_path):
    rows = [
        {
            "a": np.full((2, 3), i, np.uint8),
            "b": np.full((2,), i / 3, np.float64),
            "c": list(range(i)),
            "d": [[float(i)] * j for j in range(i)],
            "e": ["x" * i, "y"],
            "f": np.int64(-i),
            "g": bool(i % 2),
        }
        for i in range(5)
    ]
    write_tfrecords(rows, str(tmp_path))
    (batch,) = read_tfrecords(str(tmp_path), 8, shuffle=False)
    np.testing.assert_array_equal(batch["a"], [row["a"] for row in rows])
    np.testing.assert_array_equal(batch["b"], [row["b"] for row in rows])
    assert batch["c"].to_list() == [row["c"] for row in rows]
    assert batch["d"].to_list() == [row["d"] for row in rows]
    assert batch["e"].to_list() == [[s.encode() for s in row["e"]] for row in rows]
    assert batch["f"].numpy().tolist() == [0, -1, -2, -3, -4]
    assert batch["g"].numpy().tolist() == [0, 1, 0, 1, 0]


def damage(manifest, record: int) -> tuple[str, int]:
    """Flips a bit of a record of the first shard; returns the file and the offset of its frame."""
    from tfdml.data.format import index

    path = manifest.path_of(manifest.splits["train"][0])
    lengths = index.read(path).lengths.astype(int)
    offset = int((lengths[:record] + FRAME).sum())
    data = bytearray(Path(path).read_bytes())
    data[offset + 20] ^= 1
    Path(path).write_bytes(data)
    return path, offset


def test_a_damaged_record_is_named(dataset):
    manifest = dataset()
    path, offset = damage(manifest, 11)
    with pytest.raises(tf.errors.OpError, match="its checksum is wrong") as raised:
        ids(only_ids(manifest))
    assert f"{path}, record 11, offset {offset}" in str(raised.value)


def test_skip_drops_exactly_the_damaged_record(dataset):
    manifest = dataset()
    sound = ids(only_ids(manifest))
    damage(manifest, 11)
    pipeline = only_ids(manifest, on_corrupt="skip")
    with pytest.warns(UserWarning, match="record 11"):
        batches = list(pipeline)
    # Records alternate between shards, so record 11 of the first of 3 is the 33rd.
    assert [len(x) for x, _, _ in batches] == [len(batch) for batch in sound]
    for (x, _, weights), batch in zip(batches, sound, strict=True):
        assert x.numpy()[weights > 0].tolist() == [i for i in batch if i != 33]
    assert list(pipeline.skipped.values())[0].endswith("its checksum is wrong")
    assert len(pipeline.skipped) == 1


def test_truncated_shard_is_detected_at_once(dataset):
    manifest = dataset()
    path = manifest.path_of(manifest.splits["train"][1])
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(ValueError, match=f"{re.escape(path)} must have .* bytes"):
        only_ids(manifest)


def test_augmentation_depends_on_the_sample_only(dataset):
    manifest = dataset()

    def noisy(x, y, seeds):
        noise = tf.map_fn(
            lambda seed: tf.random.stateless_uniform([3], seed),
            seeds,
            fn_output_signature="float32",
        )
        return x + noise, y

    options = {"label": "y", "features": ["x"], "augment": noisy}
    pipeline = read_tfrecords(manifest.directory, 16, **options)
    epochs = [[x.numpy() for x, _ in pipeline] for _ in range(2)]
    again = read_tfrecords(manifest.directory, 16, state=pipeline.state_at(1, 3), **options)
    for a, b in zip(epochs[1][3:], [x.numpy() for x, _ in again], strict=True):
        np.testing.assert_array_equal(a, b)
    noise = [np.sort(np.concatenate(e) - np.round(np.concatenate(e)), 0) for e in epochs]
    assert (noise[0] != noise[1]).any()


def test_a_keras_layer_transforms_whole_batches(dataset):
    layer = keras.layers.Rescaling(0.5, offset=1.0)
    options = {"label": "y", "features": ["x"], "shuffle": False}
    plain = read_tfrecords(dataset().directory, 16, **options)
    scaled = read_tfrecords(
        plain._dataset.manifest.directory, 16, transform=lambda x, y: (layer(x), y), **options
    )
    for (x, y), (z, w) in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(z, x.numpy() * 0.5 + 1.0)
        np.testing.assert_array_equal(y, w)


def test_length_buckets_resume_at_any_position(dataset):
    options = {"features": ["id", "text"], "seed": 2, "bucket_by_length": True}
    whole = read_tfrecords(dataset().directory, 10, **options)
    epochs = [[batch["id"].numpy().tolist() for batch in whole] for _ in range(2)]
    assert sorted(sum(epochs[0], [])) == list(range(100))
    assert epochs[0] != epochs[1]
    # The text of record i is repeated i % 7 times.
    spread = [max(i % 7 for i in batch) - min(i % 7 for i in batch) for batch in epochs[0]]
    assert np.mean(spread) < 3
    state = whole.state_at(1, 4)
    resumed = read_tfrecords(whole._dataset.manifest.directory, 10, state=state, **options)
    assert [batch["id"].numpy().tolist() for batch in resumed] == epochs[1][4:]


@pytest.mark.parametrize("records_at_once", [1, 64, 1 << 20])
def test_batches_do_not_depend_on_the_fetch_size(dataset, monkeypatch, records_at_once):
    manifest = dataset()
    wanted = ids(only_ids(manifest))
    monkeypatch.setattr("tfdml.data.read.fetching.SPAN_RECORDS", records_at_once)
    pipeline = only_ids(manifest)
    assert ids(pipeline) == wanted
    text = read_tfrecords(manifest.directory, 16, seed=1)
    found = [
        (i, x, s.decode())
        for batch in text
        for i, x, s in zip(
            batch["id"].numpy(), batch["x"].numpy(), batch["text"].numpy(), strict=True
        )
    ]
    assert all((x == i).all() and s == f"row {i}" * (i % 7) for i, x, s in found)


def test_the_first_batch_is_fetched_alone(dataset, monkeypatch):
    pipeline = only_ids(dataset())
    sizes = []
    fetch = pipeline._fetcher.reader.read
    monkeypatch.setattr(
        pipeline._fetcher.reader, "read", lambda ids: (sizes.append(len(ids)), fetch(ids))[1]
    )
    ids(pipeline)
    assert sizes == [16, 32, 52]


def test_state_stays_small(tmp_path):
    """A thousand shards, and a position in the middle of epoch 10,000."""
    rows = ({"id": i} for i in range(2000))
    write_tfrecords(rows, str(tmp_path), shards=1000)
    pipeline = read_tfrecords(str(tmp_path), 8, seed=2**60)
    next(iter(pipeline))
    assert len(json.dumps(pipeline.state_at(10_000, 100))) < 512
    assert len(json.dumps(pipeline.state())) < 512


def test_blocks_are_read_once(tmp_path):
    rows = ({"x": np.full(1000, i, np.float32)} for i in range(2000))
    write_tfrecords(rows, str(tmp_path), shards=2)
    pipeline = read_tfrecords(str(tmp_path), 32)
    for _ in pipeline:
        pass
    assert (
        pipeline._fetcher.reader.blocks_read
        == len(pipeline._fetcher.reader.layout.block_records)
        > 20
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be a positive integer"),
        ({"label": "z"}, "`features` and `label` must be of the schema"),
        ({"split": "test"}, "`split` must be one of"),
        ({"on_corrupt": "ignore"}, "`on_corrupt` must be"),
        ({"window": 0}, "`window` must be positive"),
        ({"state": {"epoch": 1}}, "`state` must be the state of a pipeline"),
        ({"batch_size": 200, "end": "drop"}, "`batch_size` must be at most the number"),
    ],
)
def test_wrong_arguments(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        read_tfrecords(dataset().directory, **{"batch_size": 8, **options})


def test_fewer_records_than_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`shards` must be at most the number of records"):
        write_tfrecords(records(2), str(tmp_path), shards=3)
    assert os.listdir(tmp_path) == []
