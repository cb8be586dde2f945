"""Checks `RobustAggregator` on simulated ranks against the rules in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.aggregation import numpy_rules
from tfdml.aggregation import CenteredClipping, RobustRule, TrimmedMean
from tfdml.collectives.aggregator import StepFactors, StepGradients
from tfdml.collectives.collective import Collective
from tfdml.collectives.cut import cut_in_rows
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import QSGD, Float16
from tfdml.strategies.aggregation.robust_aggregator import RobustAggregator

RANKS, BUCKET = 4, 4096
SHAPES = [(40, 50), (7,), (3, 3, 16, 24), (2,)]
NAMES = [f"layer_{i}/kernel" for i in range(len(SHAPES))]
WEIGHTS = [0.4, 0.3, 0.1, 0.2]
TRIMMED, CLIPPED = TrimmedMean(1), CenteredClipping(80.0, momentum=0.9, iterations=2)
RULES = {"trimmed": TRIMMED, "clipped": CLIPPED}


def _means(rank: int, step: int, dtype: str = "float32") -> list[np.ndarray]:
    """Returns a rank's mean gradients of a step; the last rank's are far from the others'."""
    common, own = np.random.default_rng(step), np.random.default_rng([rank, step])
    far = 30.0 if rank == RANKS - 1 else 1.0
    return [(common.normal(size=s) + far * own.normal(size=s)).astype(dtype) for s in SHAPES]


def _given(means: list, weight: float, scale: float | None = None, **options) -> StepGradients:
    """Returns what a rank passes to its aggregator: gradients times the weight and loss scale."""
    factors = StepFactors(None if scale is None else tf.constant(scale))
    values = [tf.constant(m * m.dtype.type(weight * (scale or 1.0))) for m in means]
    return StepGradients(
        values, NAMES, "g", lambda: factors, weight=tf.constant(weight, tf.float64), **options
    )


def _results(rule: RobustRule, steps: int = 3, weights=WEIGHTS, dtype="float32", **options):
    """Returns each rank's results of some steps, all weights in one vector."""

    def run(collective: Collective) -> list[np.ndarray]:
        aggregator = RobustAggregator(collective, rule, BUCKET, **options)
        rank = collective.rank
        return [
            _flat(aggregator.aggregate(_given(_means(rank, step, dtype), weights[rank])))
            for step in range(steps)
        ]

    return run_ranks(len(weights), run)


def _flat(tensors: list) -> np.ndarray:
    return np.concatenate([np.asarray(t).ravel() for t in tensors])


def _expected(rule: RobustRule, steps: int = 3, weights=WEIGHTS) -> list[np.ndarray]:
    weights = np.array(weights)
    averaged = numpy_rules.Momentum(rule.momentum)
    center, found = np.zeros(sum(map(np.prod, SHAPES))), []
    for step in range(steps):
        means = np.stack([_flat(_means(r, step)).astype("float64") for r in range(len(weights))])
        if isinstance(rule, TrimmedMean):
            found.append(numpy_rules.trimmed_mean(means, weights, rule.num_byzantine))
            continue
        center = numpy_rules.centered_clipping(
            averaged(means, weights), weights, center, rule.radius, rule.iterations
        )
        found.append(center)
    return found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_results_are_those_of_numpy_with_the_same_bits_on_all_ranks(rule):
    first, *others = _results(rule)
    for result, expected in zip(first, _expected(rule), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    for other in others:
        np.testing.assert_array_equal(np.stack(first), np.stack(other))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_float64_is_computed_in_float64(rule):
    (first, *_) = _results(rule, steps=1, dtype="float64")
    expected = [_flat(_means(r, 0, "float64")) for r in range(RANKS)]
    if rule is TRIMMED:
        wanted = numpy_rules.trimmed_mean(np.stack(expected), np.array(WEIGHTS), 1)
        np.testing.assert_allclose(first[0], wanted, rtol=1e-12, atol=1e-13)
    assert first[0].dtype == np.float64


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (TrimmedMean(0), [0.25] * 4),
        (TrimmedMean(0), WEIGHTS),
        (CenteredClipping(float("inf"), momentum=0.0), WEIGHTS),
    ],
)
def test_without_trimming_or_clipping_it_is_the_mean(rule, weights):
    (first, *_) = _results(rule, weights=weights)
    for step, result in enumerate(first):
        mean = sum(np.float32(w) * _flat(_means(r, step)) for r, w in enumerate(weights))
        if weights[0] == 0.25:
            np.testing.assert_array_equal(result, mean)
        np.testing.assert_allclose(result, mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compressor", [Float16(), QSGD(8)], ids=repr)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_codecs_encode_what_is_combined(rule, compressor):
    first, *others = _results(rule, compressor=compressor)
    exact = _expected(rule)
    for result, expected in zip(first, exact, strict=True):
        error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.08
    for other in others:
        np.testing.assert_array_equal(np.stack(first), np.stack(other))


def test_a_rank_without_rows_is_not_counted():
    weights = [0.5, 0.25, 0.0, 0.25]
    (first, *_) = _results(CLIPPED, weights=weights)
    for result, expected in zip(first, _expected(CLIPPED, weights=weights), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rank_without_rows_is_no_outlier(rule):
    """Its gradient, of a row that is another rank's, may be anything."""
    weights = [0.5, 0.25, 0.0, 0.25]

    def run(collective: Collective) -> list[np.ndarray]:
        noted = []
        given = _given(
            _means(collective.rank, 0),
            weights[collective.rank],
            note_cut=lambda cut, apart: noted.append((cut.numpy(), apart.numpy())),
        )
        RobustAggregator(collective, rule, BUCKET).aggregate(given)
        return noted

    for noted in run_ranks(RANKS, run):
        assert noted
        assert all(np.isfinite(apart).all() and cut[2] < 1 for cut, apart in noted)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("wrong", [1, 2])
def test_overflow_of_few_ranks_is_left_out_and_of_half_skips_the_step(rule, wrong):
    def run(collective: Collective) -> tuple:
        aggregator = RobustAggregator(collective, rule, BUCKET)
        rank, found, kept = collective.rank, [], []
        for step in range(3):
            means = _means(rank, step)
            if step == 1 and rank < wrong:
                means[0][0, 0] = np.inf
            given = _given(means, 0.25, 1024.0 if step < 2 else 512.0, may_overflow=True)
            found.append(_flat(aggregator.aggregate(given)) / (1024.0 if step < 2 else 512.0))
            kept.append({name: v.numpy() for name, v in aggregator.state.items()})
        return found, kept

    results = run_ranks(RANKS, run)
    finite = [np.isfinite(found).all() for found in results[0][0]]
    assert finite == [True, wrong == 1, True]
    for rank, (_, kept) in enumerate(results):
        # The rank's own momentum does not take what is not finite.
        own = [np.array_equal(kept[0][n], kept[1][n]) for n in kept[0] if n.startswith("momentum")]
        assert not own or all(own) == (rank < wrong or wrong == 2)
        centers = [n for n in kept[0] if n.startswith("center")]
        assert all(np.array_equal(kept[0][n], kept[1][n]) for n in centers) == (
            wrong == 2 or not centers
        )
    for found, _ in results[1:]:
        np.testing.assert_array_equal(np.stack(found), np.stack(results[0][0]))


def test_loss_scale_changes_nothing():
    def run(collective: Collective, scale: float | None) -> list[np.ndarray]:
        aggregator = RobustAggregator(collective, CLIPPED, BUCKET)
        means = [_means(collective.rank, step) for step in range(3)]
        return [_flat(aggregator.aggregate(_given(m, 0.25, scale))) / (scale or 1) for m in means]

    plain, scaled = (run_ranks(RANKS, lambda c, s=s: run(c, s))[0] for s in (None, 4096.0))
    np.testing.assert_array_equal(np.stack(plain), np.stack(scaled))


@pytest.mark.parametrize(
    "compressor", [None, pytest.param(QSGD(8), marks=pytest.mark.slow)], ids=repr
)
def test_restored_state_goes_on_with_the_same_bits(compressor):
    def run(collective: Collective, before: list | None, steps: range) -> tuple:
        aggregator = RobustAggregator(collective, CLIPPED, BUCKET, compressor)
        if before is not None:
            aggregator.restore(before)
        rank = collective.rank
        found = [_flat(aggregator.aggregate(_given(_means(rank, s), 0.25))) for s in steps]
        return found, {name: v.numpy() for name, v in aggregator.state.items()}

    whole = run_ranks(RANKS, lambda c: run(c, None, range(4)))
    half = run_ranks(RANKS, lambda c: run(c, None, range(2)))
    states = [state for _, state in half]
    resumed = run_ranks(RANKS, lambda c: run(c, states, range(2, 4)))
    np.testing.assert_array_equal(np.stack(whole[0][0][2:]), np.stack(resumed[0][0]))
    # With another number of ranks each has an earlier rank's momentum, and all have the center.
    fewer = run_ranks(3, lambda c: run(c, states, range(0)))
    assert all(len(found) == 0 for found, _ in fewer)
    more = run_ranks(5, lambda c: run(c, states, range(2, 3)))
    assert np.isfinite(more[0][0][0]).all()
    assert {n for n in states[0] if n.startswith("momentum")} == {f"momentum/{n}" for n in NAMES}


def test_sparse_gradients_are_combined_as_dense_ones():
    def run(collective: Collective, dense: bool) -> np.ndarray:
        rows = tf.IndexedSlices(
            tf.constant(_means(collective.rank, 0)[0][:2]) * 0.25,
            tf.constant([collective.rank, 0]),
            tf.constant([40, 50], tf.int64),
        )
        value = tf.convert_to_tensor(rows) if dense else rows
        given = StepGradients([value], ["table"], "g", weight=tf.constant(0.25, tf.float64))
        return _flat(RobustAggregator(collective, CLIPPED, BUCKET).aggregate(given))

    sparse, dense = (run_ranks(RANKS, lambda c, d=d: run(c, d))[0] for d in (False, True))
    np.testing.assert_array_equal(sparse, dense)
    assert np.abs(sparse).max() > 0


def test_owners_get_their_parts():
    cuts = [cut_in_rows(shape, RANKS) for shape in SHAPES]

    def run(collective: Collective) -> list:
        aggregator = RobustAggregator(collective, TRIMMED, BUCKET)
        return aggregator.aggregate(_given(_means(collective.rank, 0), 0.25, cuts=cuts))

    whole = run_ranks(
        RANKS,
        lambda c: RobustAggregator(c, TRIMMED, BUCKET).aggregate(_given(_means(c.rank, 0), 0.25)),
    )[0]
    for rank, parts in enumerate(run_ranks(RANKS, run)):
        for cut, part, full in zip(cuts, parts, whole, strict=True):
            expected = full if cut is None else cut.part_of(full, rank)
            np.testing.assert_array_equal(part, expected)
