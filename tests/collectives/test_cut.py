"""Checks how variables are divided among ranks, and the exchanges of their parts."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients
from tfdml.collectives.cut import cut_in_rows, own_whole
from tfdml.collectives.part_exchange import PartAggregator, gather_parts
from tfdml.collectives.simulated import run_ranks

SHAPES = [(4096, 64), (3, 3, 64, 128), (1000, 50), (64,), (31,), (17, 1), (5, 7, 11)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_own_all_rows_once_and_begin_at_whole_vectors(shape, ranks):
    numbers, cut = math.prod(shape), cut_in_rows(shape, ranks)
    if cut is None:
        assert numbers < 16 * ranks
        return
    assert sum(cut.sizes) == numbers
    assert min(cut.sizes) > 0
    begins = np.cumsum([0, *cut.sizes[:-1]])
    assert not (begins % 16).any()
    value = np.arange(numbers).reshape(shape)
    parts = [cut.part_of(value, rank) for rank in range(ranks)]
    assert [p.shape for p in parts] == [cut.part_shape(rank) for rank in range(ranks)]
    np.testing.assert_array_equal(np.concatenate([p.ravel() for p in parts]), value.ravel())


def test_large_variables_are_cut_evenly_between_rows():
    cut = cut_in_rows((4096, 64), 4)
    assert cut.row_shape == (64,)
    assert set(cut.sizes) == {4096 * 64 // 4}


@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_variables_are_balanced_and_the_smallest_is_everyones(ranks):
    shapes = [(10, 10)] * 6 + [(4,)]
    cuts = own_whole(shapes, ranks)
    assert cuts[-1] is None
    owned = np.sum([cut.sizes for cut in cuts[:-1]], 0)
    assert set(owned) == {600 // ranks}
    assert all(cut.owner is not None for cut in cuts[:-1])


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_parts_and_their_gather_are_an_all_reduce(ranks, bucket_bytes):
    shapes = [(40, 3), (7,), (5, 20), (2, 2)]
    cuts = [cut_in_rows(shapes[0], ranks), None, *own_whole([shapes[2], (1,)], ranks)[:1], None]
    rng = np.random.default_rng(0)
    values = [[rng.normal(size=s) for s in shapes] for _ in range(ranks)]
    totals = [sum(of_rank[i] for of_rank in values) for i in range(len(shapes))]

    def exchange(collective) -> list[np.ndarray]:
        own = [tf.constant(v) for v in values[collective.rank]]
        aggregator = PartAggregator(collective, bucket_bytes)
        sums = aggregator.aggregate(StepGradients(own, list("abcd"), "g", cuts=cuts))
        divided = [i for i, cut in enumerate(cuts) if cut is not None]
        wholes = gather_parts(
            collective, [sums[i] for i in divided], [cuts[i] for i in divided], "w", bucket_bytes
        )
        for i, whole in zip(divided, wholes, strict=True):
            sums[i] = whole
        return [total.numpy() for total in sums]

    for result in run_ranks(ranks, exchange):
        for total, found in zip(totals, result, strict=True):
            np.testing.assert_allclose(found, total, rtol=1e-14)


def test_an_overflow_on_one_rank_is_seen_on_all():
    def exchange(collective) -> bool:
        own = np.ones(64, "float32")
        own[-1] = np.inf if collective.rank == 0 else 1.0
        gradients = StepGradients(
            [tf.constant(own)], ["a"], "g", cuts=[cut_in_rows((64,), 2)], may_overflow=True
        )
        return bool(np.isfinite(PartAggregator(collective).aggregate(gradients)[0]).all())

    assert run_ranks(2, exchange) == [False, False]
