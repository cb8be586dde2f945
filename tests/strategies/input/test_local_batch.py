"""Checks the shares of a batch: each row once, in order, for any numbers; padding of weight 0."""

import numpy as np
import pytest
import tensorflow as tf

from tfdml.strategies.input.local_batch import BatchSplitter, count_rows


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 100, 101])
def test_shares_partition_the_rows_in_order(rows, replicas):
    batch = tf.range(rows, dtype=tf.int64)
    local_batches = [BatchSplitter(i, 1, replicas).split(batch) for i in range(replicas)]
    shares = [p.shares[0] for p in local_batches]
    own = [s.drop_padding(p.parts[0]).numpy() for s, p in zip(shares, local_batches, strict=True)]
    assert np.concatenate(own).tolist() == list(range(rows))
    sizes = [len(o) for o in own]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] >= 1
    assert sum(s.fraction(tf.float64).numpy() for s in shares) == pytest.approx(1)
    for share, size, local_batch in zip(shares, sizes, local_batches, strict=True):
        assert share.rows.numpy() == size
        assert len(local_batch.parts[0]) == max(size, 1)
        assert share.present(tf.float32).numpy() == (1 if size else 0)


def test_process_with_devices_splits_like_several_processes():
    batch = tf.range(11, dtype=tf.int64)
    both = BatchSplitter(2, 2, 4).split(batch)
    for i, part in enumerate(both.parts):
        (alone,) = BatchSplitter(2 + i, 1, 4).split(batch).parts
        assert part.numpy().tolist() == alone.numpy().tolist()
    own = BatchSplitter(2, 2, 4).own_rows(batch).numpy().tolist()
    assert own == sum((p.numpy().tolist() for p in both.parts), [])


def test_nested_structures_are_split_per_leaf():
    batch = {
        "dense": tf.reshape(tf.range(10), [5, 2]),
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5, 6]]),
        "sparse": tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 0], [0, 5]]),
        "scalar": tf.constant(7),
        "none": None,
    }
    assert count_rows(batch) == 5
    (part,) = BatchSplitter(1, 1, 2).split(batch).parts
    assert part["dense"].numpy().tolist() == [[6, 7], [8, 9]]
    assert part["ragged"].to_list() == [[4], [5, 6]]
    assert tf.sparse.to_dense(part["sparse"]).numpy().tolist() == [[0, 0], [0, 5]]
    assert part["scalar"].numpy() == 7
    assert part["none"] is None


def test_a_batch_without_rows_to_split_is_an_error():
    with pytest.raises(ValueError, match="axis 0 is the batch's rows"):
        count_rows({"a": tf.constant(1), "b": None})
