"""Checks the split of rows: each row once, equally for numbers and tensors, without TensorFlow."""

import ast
from pathlib import Path

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdml import row_split
from tfdml.data.read.sharding import process_replicas
from tfdml.row_split import LocalReplicas, OwnShareDataset
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
    assert names == {"dataclasses", "typing", "numpy"}
