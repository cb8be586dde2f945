"""Checks the split of rows: each row once, equally for numbers and tensors, without TensorFlow."""

import ast
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdml import row_split
from tfdml.data.read.sharding import process_replicas
from tfdml.row_split import LocalReplicas, OwnShareDataset, integer_weights
from tfdml.strategies.input.local_batch import BatchSplitter


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 4))
def test_rows_are_assigned_once_in_order_and_evenly(rows, processes, local):
    replicas = processes * local
    members = [LocalReplicas(p * local, local, replicas) for p in range(processes)]
    bounds = [member.bounds(rows).tolist() for member in members]
    ends = [0] + [end for own in bounds for end in own[1:]]
    sizes = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
    assert ends[-1] == sum(sizes) == rows
    assert 0 <= min(sizes) <= max(sizes) <= min(sizes) + 1
    assert sizes[0] == max(sizes)
    for member, own, before in zip(members, bounds, [0, *(b[-1] for b in bounds)], strict=False):
        assert own[0] == before
        assert member.rows(rows) == slice(own[0], own[-1])
        assert member.count(rows) == own[-1] - own[0]
        assert member.num_processes == processes
        assert member.is_alone == (processes == 1)


def _sizes(weights: tuple[int, ...], rows: int) -> list[int]:
    replicas = len(weights)
    bounds = LocalReplicas(0, replicas, replicas, weights).bounds(rows)
    for first in range(replicas):
        own = LocalReplicas(first, 1, replicas, weights).bounds(rows)
        assert own.tolist() == bounds[first : first + 2].tolist()
    assert (bounds[0], bounds[-1], bounds.dtype) == (0, rows, np.int64)
    return np.diff(bounds).tolist()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(0, 3000))
def test_rows_are_in_proportion_to_weights(weights, rows):
    weights = integer_weights(weights)
    sizes = _sizes(weights, rows)
    parts = [rows * weight / sum(weights) for weight in weights]
    assert min(sizes) >= (rows >= len(weights))
    assert sizes[0] >= (rows > 0)
    if min(parts) >= 1 or rows < len(weights):
        assert max(abs(s - part) for s, part in zip(sizes, parts, strict=True)) < 1
    else:
        # Rows that small parts get beyond theirs are missing in the others, in proportion.
        missing = len(weights)
        assert all(s > part - missing - 1 for s, part in zip(sizes, parts, strict=True))


@given(st.integers(1, 9), st.integers(0, 300))
def test_equal_weights_are_equal_parts(replicas, rows):
    expected = LocalReplicas(0, replicas, replicas).bounds(rows)
    assert _sizes((1,) * replicas, rows) == np.diff(expected).tolist()


@pytest.mark.parametrize(
    ("weights", "rows", "sizes"),
    [
        ((3, 1), 8, [6, 2]),
        ((3, 1), 1, [1, 0]),
        ((1, 3), 1, [1, 0]),
        ((5, 1), 12, [10, 2]),
        ((100, 1), 8, [7, 1]),
        ((1, 100), 2, [1, 1]),
        ((1000, 1, 1, 1000), 8, [3, 1, 1, 3]),
        ((99, 1), 100, [99, 1]),
        ((1 << 19, 1 << 19), 2_000_000, [1_000_000, 1_000_000]),
    ],
)
def test_examples(weights, rows, sizes):
    assert _sizes(weights, rows) == sizes


def test_weights_become_integers():
    assert integer_weights([3, 1]) == (3, 1)
    assert integer_weights([0.6, 0.6, 0.12]) == (5, 5, 1)
    assert integer_weights([6, 2]) == (3, 1)
    first, second = integer_weights([1e9, 1])
    assert first > 1_000_000
    assert second == 1
    thirds = integer_weights([1 / 3, 2 / 3])
    assert thirds[1] / thirds[0] == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 3, 50, 101])
@pytest.mark.parametrize("weights", [(5, 2, 1), (1, 100, 1)])
def test_tensors_of_weights_and_rows_are_split_like_numbers(weights, rows):
    expected = LocalReplicas(1, 2, 3, weights).bounds(rows).tolist()
    for some_weights, some_rows in (
        (weights, tf.constant(rows, tf.int64)),
        (tf.constant(weights, tf.int64), rows),
        (tf.constant(weights, tf.int64), tf.constant(rows, tf.int64)),
    ):
        bounds = LocalReplicas(1, 2, 3, some_weights).bounds(some_rows)
        assert bounds.dtype == tf.int64
        assert bounds.numpy().tolist() == expected


@pytest.mark.parametrize("rows", [1, 7, 12])
def test_tensor_is_split_like_a_number(rows):
    member = LocalReplicas(2, 2, 6)
    bounds = member.bounds(tf.constant(rows, tf.int64))
    assert bounds.dtype == tf.int64
    assert bounds.numpy().tolist() == member.bounds(rows).tolist()


def test_strategies_and_data_use_this_split_only():
    class Two:
        num_replicas_in_sync, size, rank = 6, 2, 1

    assert process_replicas(Two()) == LocalReplicas(3, 3, 6)
    assert BatchSplitter.bounds is LocalReplicas.bounds
    assert BatchSplitter.rows is LocalReplicas.rows


def test_plain_datasets_do_not_report_shares():
    assert not isinstance(tf.data.Dataset.range(4).batch(2), OwnShareDataset)


def test_it_needs_no_tensorflow():
    tree = ast.parse(Path(row_split.__file__).read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    expected = {"dataclasses", "typing", "numpy", "collections.abc", "fractions", "math"}
    assert names == expected
