"""Checks the bytes of codecs' state, counted in advance, against what aggregators keep."""

import pytest
import tensorflow as tf

from tests.compression.aggregate import aggregate
from tests.compression.test_compressed_aggregator import COMPRESSORS, NAMES, SHAPES, gradients
from tfdml.collectives.aggregator import PlainAggregator, StepFactors, StepGradients
from tfdml.collectives.loopback import LoopbackCollective
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import Auto, Compressor, OneBit, PowerSGD, TopK
from tfdml.compression.auto.auto_aggregator import make_aggregator
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.memory.exchange import exchange_bytes, residual_bytes

# With a bucket of 4 KB the gradients are in several, of which the last is of one alone.
BUCKET = 4096
SPECS = [tf.TensorSpec(shape, tf.float32) for shape in SHAPES]


def counted(aggregator, rate: float | None = None) -> dict[str, int]:
    """Returns the bytes of an aggregator's state by name, from shapes alone."""
    given = StepGradients(SPECS, NAMES, "g", lambda: StepFactors(learning_rate=rate))
    return aggregator.state_bytes(given)


def real(aggregator) -> dict[str, int]:
    return {n: v.shape.num_elements() * v.dtype.size for n, v in aggregator.state.items()}


# One of each kind of state by default: none, chunks, tiles, momentum, matrices.
_DEFAULT = ("Float16", "TopK", "OneBit", "DeepGradientCompression", "PowerSGD")


def _by_default(compressor: Compressor, rate: float | None):
    is_default = type(compressor).__name__ in _DEFAULT and (rate is None) != compressor.biased
    return pytest.param(compressor, rate, marks=() if is_default else pytest.mark.slow)


@pytest.mark.parametrize(
    ("compressor", "rate"), [_by_default(c, rate) for c in COMPRESSORS for rate in (None, 0.1)]
)
def test_state_is_what_three_ranks_keep(compressor: Compressor, rate: float | None):
    def rank(collective):
        aggregator = CompressedAggregator(collective, compressor, BUCKET)
        learning_rate = None if rate is None else tf.constant(rate)
        own = gradients(collective.rank, 0)
        aggregate(aggregator, own, NAMES, "g", learning_rate=learning_rate)
        return real(aggregator), counted(aggregator, rate)

    for kept, estimated in run_ranks(3, rank):
        assert estimated == kept


def test_nothing_is_kept_without_compression():
    assert counted(PlainAggregator(LoopbackCollective(2))) == {}


def test_nothing_is_kept_of_gradients_that_are_too_small():
    aggregator = CompressedAggregator(LoopbackCollective(2), OneBit())
    small = StepGradients([tf.TensorSpec((3, 3), tf.float32)], ["w"], "g")
    assert aggregator.state_bytes(small) == {}


def test_candidates_of_auto_share_residuals():
    auto = Auto([OneBit(), TopK(0.1), PowerSGD(4)])
    found = counted(make_aggregator(LoopbackCollective(2), auto, BUCKET))
    names = [n for n in found if n.startswith("residual/")]
    compressed = [n for n, s in zip(NAMES, SHAPES, strict=True) if len(s) > 1]
    assert sorted(names) == sorted(f"residual/{n}" for n in compressed)
    # Each candidate has its own chunks, and PowerSGD its matrices.
    prefixes = {n.split("/")[1] for n in found if n.startswith("server_residual/")}
    assert prefixes == {"1", "2"}
    assert any(n.startswith("q/") for n in found)


def test_an_exchange_takes_sums_residuals_and_encoded_parts():
    given = StepGradients([tf.TensorSpec((1024, 1024), tf.float32)], ["w"], "g")
    whole, codec, bucket_bytes = 4 << 20, TopK(0.25), 8 << 20
    # On two ranks: the two parts that are sent, those received, the own sum, and both ranks' sums;
    # a quarter of a part's values, with their indices.
    encoded = (2 + 2 + 1 + 2) * 8 * (1 << 17)
    aggregator = make_aggregator(LoopbackCollective(2), codec, bucket_bytes)
    residuals = sum(aggregator.state_bytes(given).values())
    assert residuals >= whole
    # The sum, and three copies while a bucket is encoded.
    assert exchange_bytes(given, 2, codec, bucket_bytes) == 4 * whole + residuals + encoded


def test_owners_have_no_residual_of_sums():
    given = StepGradients([tf.TensorSpec((1024, 1024), tf.float32)], ["w"], "g")
    whole, bucket_bytes = 4 << 20, 8 << 20
    assert residual_bytes(given, 2, TopK(0.25), bucket_bytes) == pytest.approx(
        1.5 * whole, rel=1e-4
    )
    # New weights come back as they are.
    sharded = residual_bytes(given, 2, TopK(0.25), bucket_bytes, sharding=True)
    assert sharded == pytest.approx(whole, rel=1e-4)
