"""Checks mixed data sets and balanced classes: exact ratios, full coverage, resumable anywhere."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data import read_tfrecords, write_tfrecords
from tfdml.data.order import Layout
from tfdml.data.read.dataset import Shuffling
from tfdml.data.read.mixing import CYCLE, LayoutGroup, Mixed, counts_of
from tfdml.data.read.sharding import Batches
from tfdml.row_split import LocalReplicas


def groups(sizes: list[int], seed: int | None) -> list[LayoutGroup]:
    """Returns groups of these sizes, in blocks of 7 records."""
    made, first = [], 0
    for number, size in enumerate(sizes):
        blocks = np.array([7] * (size // 7) + ([size % 7] if size % 7 else []), np.int64)
        layout = Layout(blocks, np.zeros(len(blocks), np.int64))
        made.append(LayoutGroup(layout, first, number, Shuffling(seed, window=20)))
        first += size
    return made


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.one_of(st.none(), st.integers(0, 2**40)),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_epochs_have_their_parts_and_continue_the_previous_one(parts, length, seed, data):
    sizes, weights = zip(*parts, strict=True)
    ratios = np.array(weights) / sum(weights)
    made = groups(list(sizes), seed)
    epochs = [Mixed(made, ratios, length, seed or 0, epoch) for epoch in range(3)]
    drawn = [epoch.ids(0, length) for epoch in epochs]
    bounds = np.cumsum([0, *sizes])
    for number, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        own = [ids[(ids >= first) & (ids < last)] for ids in drawn]
        assert all(abs(len(o) - ratios[number] * length) < 1 for o in own)
        # Over all epochs, no record is more than one repetition behind another.
        times = np.bincount(np.concatenate(own) - first, minlength=last - first)
        assert times.max() - times.min() <= 1
    begin = data.draw(st.integers(0, length))
    end = data.draw(st.integers(begin, length + 5))
    np.testing.assert_array_equal(epochs[1].ids(begin, end), drawn[1][begin:end])


def test_parts_are_exact_in_every_cycle():
    length = 2 * CYCLE + 500
    order = Mixed(groups([50, 70], 1), [0.3, 0.7], length, 1, 0)
    ids = order.ids(0, length)
    small = [int((ids[b : b + CYCLE] < 50).sum()) for b in (0, CYCLE, 2 * CYCLE)]
    assert small == [3000, 3000, 150]
    # They are mixed within a cycle.
    assert 20 < (ids[:100] < 50).sum() < 40


def test_cycle_continues_the_previous_one():
    """As many positions as records: each is drawn once, in whatever cycle it falls."""
    sizes = [8000, 17_000]
    ids = Mixed(groups(sizes, 1), [0.32, 0.68], sum(sizes), 1, 0).ids(0, sum(sizes))
    np.testing.assert_array_equal(np.sort(ids), np.arange(sum(sizes)))


def test_counts_sum_up():
    assert counts_of([1 / 3] * 3, 10).tolist() == [4, 3, 3]
    assert counts_of([0.5, 0.25, 0.25], 3).sum() == 3


@pytest.fixture
def two_sets(tmp_path) -> list[str]:
    """Writes 40 records numbered from 0, and 10 numbered from 1,000."""
    paths = []
    for name, first, count in (("large", 0, 40), ("small", 1000, 10)):
        rows = ({"id": first + i, "kind": name} for i in range(count))
        write_tfrecords(rows, str(tmp_path / name), shards=2)
        paths.append(str(tmp_path / name))
    return paths


def ids(pipeline) -> list[int]:
    return [int(i) for batch in pipeline for i in batch]


def test_two_data_sets_at_a_ratio(two_sets):
    pipeline = read_tfrecords(two_sets, 8, features=["id"], ratios=[0.5, 0.5])
    first, second = ids(pipeline), ids(pipeline)
    assert len(first) == len(second) == 50
    assert sum(i >= 1000 for i in first) == 25
    counts = np.unique([i for i in first + second if i >= 1000], return_counts=True)[1]
    assert counts.tolist() == [5] * 10
    # The 50 of the large set: each comes once before any repeats.
    assert len({i for i in (first + second) if i < 1000}) == 40
    assert first != second


def test_without_ratios_everything_once(two_sets):
    found = ids(read_tfrecords(two_sets, 8, features=["id"]))
    assert sorted(found) == [*range(40), *range(1000, 1010)]


def test_resume_in_the_middle(two_sets):
    options = {"features": ["id"], "ratios": [1, 3], "epoch_records": 64, "seed": 3}
    whole = read_tfrecords(two_sets, 8, **options)
    epochs = [ids(whole), ids(whole)]
    again = read_tfrecords(two_sets, 8, **options, state=whole.state_at(1, 5))
    assert ids(again) == epochs[1][40:]
    with pytest.raises(ValueError, match="`state` must be of a pipeline with the same data"):
        read_tfrecords(two_sets, 8, **{**options, "ratios": [1, 2]}, state=whole.state_at(1, 5))


def test_workers_share_the_same_batches(two_sets):
    pipeline = read_tfrecords(two_sets, 8, features=["id"], ratios=[1, 3])
    order, batches = pipeline._order(0), Batches(8)
    for step in range(pipeline.steps_per_epoch):
        whole = batches.rows(order, 0, step, LocalReplicas())
        parts = [batches.rows(order, 0, step, LocalReplicas(r, 1, 3)) for r in range(3)]
        for field in ("ids", "positions"):
            joined = np.concatenate([getattr(p, field) for p in parts])
            np.testing.assert_array_equal(joined, getattr(whole, field))


CLASSES = ["a"] * 30 + ["b"] * 9 + ["c"] * 3


@pytest.fixture
def classes(tmp_path) -> str:
    rows = ({"id": i, "name": name, "number": ord(name) - 97} for i, name in enumerate(CLASSES))
    write_tfrecords(rows, str(tmp_path), shards=2)
    return str(tmp_path)


def drawn(pipeline) -> dict[str, int]:
    names = [CLASSES[i] for i in ids(pipeline)]
    return {name: names.count(name) for name in "abc"}


@pytest.mark.parametrize("feature", ["name", "number"])
def test_classes_are_balanced(classes, feature):
    pipeline = read_tfrecords(classes, 8, features=["id"], balance=feature)
    found = ids(pipeline)
    assert drawn(pipeline) == {"a": 14, "b": 14, "c": 14}
    times = np.unique([i for i in found if CLASSES[i] == "c"], return_counts=True)[1]
    assert sorted(times) == [4, 5, 5]


def test_large_class_is_exhausted_before_any_repeats(classes):
    pipeline = read_tfrecords(classes, 6, features=["id"], balance="name", epoch_records=45)
    large = [i for _ in range(2) for i in ids(pipeline) if CLASSES[i] == "a"]
    assert sorted(large) == list(range(30))


def test_classes_by_ratio(classes):
    options = {"features": ["id"], "balance": "name", "epoch_records": 40}
    assert drawn(read_tfrecords(classes, 8, ratios={"a": 1, "b": 3}, **options)) == {
        "a": 10, "b": 30, "c": 0,
    }  # fmt: skip


def test_repeated_record_gets_a_new_augmentation(classes):
    def noisy(x, seeds):
        noise = tf.map_fn(
            lambda seed: tf.random.stateless_uniform([], seed), seeds, fn_output_signature="float32"
        )
        return tf.cast(x, tf.float32) + noise

    pipeline = read_tfrecords(classes, 8, features=["id"], balance="name", augment=noisy)
    values = np.concatenate(list(pipeline))
    assert len(np.unique(values)) == len(values) > len(np.unique(values.astype(int)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "x"}, "`balance` must be a feature of one integer or string"),
        ({"balance": "name", "ratios": {"z": 1}}, "`ratios` must name classes of the data"),
        ({"balance": "name", "ratios": [1, 2]}, "`ratios` must be a dict"),
        ({"balance": "name", "ratios": {"a": 0}}, "`ratios` must be positive numbers"),
        ({"balance": "name", "epoch_records": 0}, "`epoch_records` must be positive"),
        ({"ratios": [1.0]}, "must be left out for one data set"),
        ({"balance": "name", "ledger": "notes"}, "`bucket_by_length` and `ledger` must be left"),
    ],
)
def test_wrong_arguments(classes, options, message):
    with pytest.raises(ValueError, match=message):
        read_tfrecords(classes, 8, **options)


def test_wrong_mixtures(two_sets, classes):
    with pytest.raises(ValueError, match="`ratios` must have a number for each data set"):
        read_tfrecords(two_sets, 8, ratios=[1, 2, 3])
    with pytest.raises(ValueError, match="`balance` must be of one data set"):
        read_tfrecords(two_sets, 8, balance="kind")
    with pytest.raises(ValueError, match="must be data sets with the same features"):
        read_tfrecords([two_sets[0], classes], 8, features=["kind"])
