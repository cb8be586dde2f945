"""Checks the rule by which parts follow measured times, over simulated steps."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdml.collectives.simulated import run_ranks
from tfdml.row_split import LocalReplicas
from tfdml.strategies.batch_split import BatchSplit, balanced
from tfdml.strategies.observers.replica_clock import ReplicaClock
from tfdml.strategies.parameter_server.chief.share_clock import ShareClock


def _rows(weights: tuple[int, ...], total: int) -> np.ndarray:
    replicas = len(weights)
    return np.diff(LocalReplicas(0, replicas, replicas, weights).bounds(total))


def _epochs(per_row, total: int, epochs: int = 12, fixed=0.0) -> list[np.ndarray]:
    """Returns the rows of each epoch, with steps of `fixed + per_row * rows` seconds."""
    split = BatchSplit("auto", len(per_row))
    seen = []
    for _ in range(epochs):
        split.begin_epoch()
        rows = _rows(split.weights, total)
        seen.append(rows)
        split.plan(balanced(rows, fixed + np.array(per_row) * rows))
    return seen


def _efficiency(per_row, rows, fixed=0.0) -> float:
    """Returns the time of parts in proportion to the speeds, over that of `rows`."""
    best = sum(rows) / np.sum(1 / np.array(per_row))
    return float((best + fixed) / (fixed + np.array(per_row) * rows).max())


@given(st.lists(st.floats(1e-4, 1e-2), min_size=2, max_size=6))
def test_it_converges_and_stays(per_row):
    # So many that a part of one row is less than the 5 percent that change nothing.
    epochs = _epochs(per_row, 600_000)
    assert _efficiency(per_row, epochs[-1]) > 0.94
    assert (epochs[-1] == epochs[-2]).all(), "It changes no more."
    assert all(rows.sum() == 600_000 and rows.min() >= 1 for rows in epochs)


def test_it_converges_with_a_part_that_does_not_depend_on_rows():
    per_row, fixed = [1e-3, 1e-3, 5e-3], 0.1
    epochs = _epochs(per_row, 600, 20, fixed)
    assert _efficiency(per_row, epochs[-1], fixed) > 0.94
    # The third takes longer for one row than the others for half of the rows each.
    assert _epochs(per_row, 600, 20, np.array([0.1, 0.1, 0.5]))[-1].tolist() == [300, 299, 1]


def test_it_goes_a_part_of_the_way():
    first, second, third = _epochs([1.0, 1.0, 5.0], 3300, 3)
    assert first.tolist() == [1100] * 3
    # In proportion to the speeds, the slow one would get 300 at once.
    assert 300 < third[2] < second[2] < 700


def test_a_gain_of_less_than_5_percent_changes_nothing():
    assert balanced([50, 50], [1.0, 1.04]) is None
    assert balanced([50, 50], [1.0, 1.0]) is None
    assert balanced([50, 50], [1.0, 1.2]) is not None
    # One row cannot be divided.
    assert balanced([1, 1], [1.0, 1.9]) is None


def test_every_replica_keeps_a_row():
    for rows in _epochs([1e-4, 1e-4, 10.0], 9):
        assert rows.min() == 1 or rows.tolist() == [3, 3, 3]


def test_new_parts_hold_from_the_next_epoch_on():
    split = BatchSplit("auto", 2)
    in_step = tf.function(split.in_step)
    assert in_step().numpy().tolist() == [1, 1]
    split.plan((3, 1))
    assert (split.weights, in_step().numpy().tolist()) == ((1, 1), [1, 1])
    split.begin_epoch()
    assert (split.weights, in_step().numpy().tolist()) == ((3, 1), [3, 1])
    assert in_step.experimental_get_tracing_count() == 1
    assert split.fractions == [0.75, 0.25]


def test_parts_of_another_number_of_replicas_are_equal_again():
    split = BatchSplit("auto", 3)
    split.plan((5, 1))
    split.begin_epoch()
    assert split.weights == (1, 1, 1)


def test_given_parts_stay():
    split = BatchSplit((3, 1), 2)
    split.plan((1, 1))
    split.begin_epoch()
    assert split.weights == split.in_step() == (3, 1)
    assert not BatchSplit("auto", 1).is_auto


def test_clock_sums_whole_steps_of_all_ranks():
    batches = [[6, 2], [6, 2], [6, 2], [1, 0]]

    def steps(collective):
        clock = ReplicaClock(collective.rank, 1, 2)
        clock.reset()
        for number, batch in enumerate(batches):
            clock.begin()
            clock.note_gradients([[tf.ones(3)]], [tf.constant(batch[collective.rank], tf.int64)])
            clock.add(collective.all_reduce([clock.slots()], f"step_{number}")[0])
        return clock.read()

    (rows, seconds), other = run_ranks(2, steps)
    assert rows.tolist() == [6, 2]
    assert (seconds > 0).all()
    np.testing.assert_array_equal(other, (rows, seconds))


def test_clock_without_a_whole_step_knows_nothing():
    clock = ReplicaClock(0, 1, 1)
    clock.reset()
    clock.begin()
    clock.note_gradients([[tf.ones(3)]], [tf.constant(1, tf.int64)])
    clock.add(clock.slots())
    assert clock.read() is None


@pytest.mark.parametrize(
    ("workers", "rows", "counts"),
    [([0, 1], [6, 2], True), ([1, 0], [6, 2], False), ([0, 1], [3, 1], False)],
)
def test_clock_of_workers_counts_their_own_shares(workers, rows, counts):
    clock = ShareClock(2)
    clock.add([0, 1], [6, 2], [9.0, 9.0])  # The first step is left out.
    clock.add([0, 1], [6, 2], [1.0, 2.0])
    clock.add(workers, rows, [3.0, 4.0])
    found = [part.tolist() for part in clock.read()]
    assert found == ([[6, 2], [2.0, 3.0]] if counts else [[6, 2], [1.0, 2.0]])
