"""Checks the buckets of gradients and the sums over them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdml.collectives.aggregator import sum_in_buckets
from tfdml.collectives.buckets import plan_buckets
from tfdml.collectives.simulated import SimulatedCollective, run_ranks

F32, F16 = tf.float32, tf.float16


@pytest.mark.parametrize(
    ("nbytes", "dtypes", "expected"),
    [
        ([], [], []),
        ([10], [F32], [[0]]),
        ([1, 1, 1, 1], [F32] * 4, [[3, 2], [1, 0]]),  # The first holds 2 values, the others 4.
        ([1, 1, 1, 1, 1, 1, 1], [F32] * 7, [[6, 5], [4, 3, 2, 1], [0]]),
        ([1, 9, 1], [F32] * 3, [[2, 1], [0]]),  # A small tensor shares a bucket with a large one.
        ([9, 1, 9, 9], [F32] * 4, [[3], [2], [1, 0]]),
        ([1, 1, 1], [F32, F16, F16], [[2, 1], [0]]),
        ([1, 1, 1], [F16, F32, F16], [[2], [1], [0]]),
    ],
)
def test_buckets_are_ordered_from_last_layer_to_first(nbytes, dtypes, expected):
    buckets = plan_buckets(nbytes, dtypes, limit=4, first_limit=2)
    assert [b.indices for b in buckets] == expected
    assert [b.nbytes for b in buckets] == [sum(nbytes[i] for i in b) for b in expected]


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="limit=0, first_limit=2"):
        plan_buckets([1], [F32], limit=0, first_limit=2)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_sums_keep_the_order_of_the_gradients(bucket_bytes):
    shapes = [(3, 4), (5,), (), (2, 2)]

    def gradients(rank):
        rng = np.random.default_rng(rank)
        return [tf.constant(rng.normal(size=s), F32) for s in shapes]

    wanted = [
        np.sum([g.numpy() for g in group], 0)
        for group in zip(*map(gradients, range(3)), strict=True)
    ]
    for sums in run_ranks(
        3, lambda c: sum_in_buckets(c, gradients(c.rank), "g", bucket_bytes, bucket_bytes)
    ):
        for total, expected in zip(sums, wanted, strict=True):
            np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_sparse_gradients_are_gathered():
    def run(collective):
        rows = tf.constant([[1.0, 2.0]]) * (collective.rank + 1)
        sparse = tf.IndexedSlices(rows, tf.constant([collective.rank]), tf.constant([4, 2]))
        dense, total = sum_in_buckets(collective, [tf.ones(3), sparse], "g")
        return dense.numpy().tolist(), tf.convert_to_tensor(total).numpy().tolist()

    wanted = ([2.0] * 3, [[1.0, 2.0], [2.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    assert run_ranks(2, run) == [wanted, wanted]


@pytest.mark.parametrize("values", [tf.float32, tf.float64, tf.bfloat16])
@pytest.mark.parametrize("indices", [tf.int32, tf.int64])
@pytest.mark.parametrize("shape", [[], [3], [2, 5]])
def test_rows_of_any_kind_are_one_message(values, indices, shape):
    """A second one takes a second round trip: Horovod remembers no message of changing size."""
    sizes = []

    def run(collective):
        original = collective.all_gather

        def counting(tensor, name):
            sizes.append((name, tensor.shape[1]))
            return original(tensor, name)

        collective.all_gather = counting
        count = 2 * collective.rank  # Rank 0 has no rows.
        rows = tf.cast(tf.random.stateless_normal([count, *shape], [1, 2]), values)
        numbers = tf.cast(tf.range(count) * 3, indices)
        own = tf.IndexedSlices(rows, numbers, tf.constant([9, *shape], indices))
        (total,) = sum_in_buckets(collective, [own], "g")
        assert (total.values.dtype, total.indices.dtype) == (values, indices)
        return tf.cast(total.values, F32).numpy().tolist(), total.indices.numpy().tolist()

    rows = tf.cast(tf.random.stateless_normal([2, *shape], [1, 2]), values)
    assert run_ranks(2, run) == [(tf.cast(rows, F32).numpy().tolist(), [0, 3])] * 2
    width = math.prod(shape) * values.size + indices.size
    assert sizes == [("g/sparse_0", width)] * 2


def test_exchanges_are_named_and_ordered(monkeypatch):
    calls = []
    original = SimulatedCollective.all_reduce

    def recording(self, tensors, name):
        if self.rank == 0:
            calls.append((name, [t.shape.as_list() for t in tensors]))
        return original(self, tensors, name)

    monkeypatch.setattr(SimulatedCollective, "all_reduce", recording)
    gradients = [tf.zeros(n, F32) for n in (1, 2, 3, 4)]
    run_ranks(2, lambda c: sum_in_buckets(c, gradients, "step", 12, 16))
    assert calls == [
        ("step/bucket_0", [[4]]),
        ("step/bucket_1", [[3]]),
        ("step/bucket_2", [[2], [1]]),
    ]
