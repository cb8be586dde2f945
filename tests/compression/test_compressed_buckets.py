"""Checks which compressed gradients are exchanged together."""

import math

import pytest
import tensorflow as tf

from tests.compression.aggregate import aggregate
from tests.compression.test_compressed_aggregator import BUCKET, NAMES, SHAPES, gradients
from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import QSGD, DeepGradientCompression, OneBit, PowerSGD, RandomK, TopK
from tfdml.compression.auto.cost_model import traffic
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.compression.exchange.compressed_buckets import plan_compressed_buckets

# 16 MiB each, of which PowerSGD sends 64 KiB.
LAYERS = [(2048, 2048)] * 6 + [(2048, 10)]


def planned(compressor, limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Returns the layers of each bucket, whose bytes must be those of its gradients."""
    buckets = plan_compressed_buckets(compressor, LAYERS, limit)
    for bucket in buckets:
        assert bucket.nbytes == sum(4 * math.prod(LAYERS[i]) for i in bucket.indices)
    return [bucket.indices for bucket in buckets]


@pytest.mark.parametrize(
    ("compressor", "limit", "expected"),
    [
        (PowerSGD(4), BUCKET_BYTES, [[6, 5, 4], [3, 2, 1, 0]]),
        (PowerSGD(4), BUCKET_BYTES // 4, [[6, 5, 4], [3, 2], [1, 0]]),
        (PowerSGD(32), BUCKET_BYTES, [[6, 5], [4], [3], [2], [1], [0]]),
        (RandomK(0.01), BUCKET_BYTES, [[6, 5], [4, 3, 2, 1], [0]]),
        (RandomK(0.25), BUCKET_BYTES, [[6, 5], [4], [3], [2], [1], [0]]),
    ],
)
def test_what_is_sent_fills_a_bucket_that_all_reduces_carry(compressor, limit, expected):
    assert planned(compressor, limit) == expected


@pytest.mark.parametrize("compressor", [QSGD(4), OneBit(), TopK(), DeepGradientCompression(0.001)])
def test_gradients_fill_a_bucket_that_is_encoded(compressor):
    assert planned(compressor) == [[6, 5], [4], [3], [2], [1], [0]]


def test_the_cost_model_counts_the_exchanges():
    dtypes = [tf.float32] * len(LAYERS)
    assert traffic(PowerSGD(4), LAYERS, dtypes, size=2).exchanges == 2 * 2
    assert traffic(OneBit(), LAYERS, dtypes, size=2).exchanges == 2 * 6


@pytest.mark.parametrize("compressor", [PowerSGD(2), RandomK(0.1)])
def test_sums_do_not_depend_on_the_buckets(compressor):
    def rank(collective, limit):
        aggregator = CompressedAggregator(collective, compressor, limit)
        for step in range(3):
            sums = aggregate(aggregator, gradients(collective.rank, step), NAMES, "g")
        return [t.numpy().tobytes() for t in sums]

    compressed = [s for s in SHAPES if len(s) > 1]
    counts = [len(plan_compressed_buckets(compressor, compressed, n)) for n in (BUCKET, 1 << 20)]
    assert counts[0] > counts[1]
    alone, together = (run_ranks(2, lambda c, n=n: rank(c, n)) for n in (BUCKET, 1 << 20))
    assert alone == together
