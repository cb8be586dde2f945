"""Checks that sparse gradients are sent as rows only if that needs fewer bytes."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compression.aggregate import aggregate
from tfdml.collectives.collective import Collective
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import QSGD
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator

ROWS, WIDTH = 40, 32


class Counting(Collective):
    """Collective that counts the bytes a rank sends, by the formulas of the ring."""

    def __init__(self, inner: Collective):
        super().__init__(inner.topology)
        self._inner, self.sent = inner, 0.0

    def all_reduce(self, tensors, name):
        share = 2 * (self.size - 1) / self.size
        self.sent += share * sum(t.shape.num_elements() * t.dtype.size for t in tensors)
        return self._inner.all_reduce(tensors, name)

    def all_gather(self, tensor, name):
        total = self._inner.all_gather(tensor, name)
        self.sent += (self.size - 1) / self.size * total.shape.num_elements() * total.dtype.size
        return total

    def all_to_all(self, tensor, name):
        return self._inner.all_to_all(tensor, name)

    def broadcast(self, tensor, name, root=0):
        return self._inner.broadcast(tensor, name, root)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rows", "sparse"), [(4, True), (38, True), (200, False)])
def test_cheaper_representation_is_sent(size, rows, sparse):
    def rank(collective):
        counting = Counting(collective)
        rng = np.random.default_rng(collective.rank)
        # Other ranks have different numbers of rows.
        indices = rng.integers(0, ROWS, rows // size + collective.rank)
        values = rng.normal(size=(len(indices), WIDTH)).astype("float32")
        own = tf.IndexedSlices(values, tf.constant(indices), tf.constant([ROWS, WIDTH]))
        aggregator = CompressedAggregator(counting, QSGD(8))
        (total,) = aggregate(aggregator, [own], ["table"], "g")
        return tf.convert_to_tensor(own).numpy(), total, counting.sent

    results = run_ranks(size, rank)
    wanted = sum(own for own, _, _ in results)
    for _, total, sent in results:
        assert isinstance(total, tf.IndexedSlices)
        np.testing.assert_allclose(tf.convert_to_tensor(total), wanted, rtol=1e-5, atol=1e-6)
        gathered = np.count_nonzero(np.any(wanted != 0, 1))
        assert len(total.indices) == (gathered if sparse else ROWS)
        most = min(
            (size - 1) / size * (rows + 3) * (4 * WIDTH + 8),
            2 * (size - 1) / size * ROWS * WIDTH * 4,
        )
        assert sent <= most + 64


def test_number_of_rows_may_change_in_a_graph():
    from tfdml.collectives.loopback import LoopbackCollective

    aggregator = CompressedAggregator(LoopbackCollective(2), QSGD(8))
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)])
    def step(values, indices):
        traces.append(1)
        own = tf.IndexedSlices(values, indices, tf.constant([3, 2], tf.int64))
        (total,) = aggregate(aggregator, [own], ["table"], "g")
        return tf.convert_to_tensor(total), tf.shape(total.indices)[0]

    few, count = step(tf.ones([1, 2]), tf.constant([1], tf.int64))
    assert count == 1  # Both ranks have the same row.
    np.testing.assert_array_equal(few, [[0, 0], [2, 2], [0, 0]])
    many, count = step(tf.ones([9, 2]), tf.constant([1] * 9, tf.int64))
    assert count == 3  # The dense gradient.
    np.testing.assert_array_equal(many, [[0, 0], [9, 9], [0, 0]])
    assert len(traces) == 1
