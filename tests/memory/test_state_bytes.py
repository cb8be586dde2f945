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
