"""Checks that data order, clipping, overflow and logs agree on all ranks."""

import re

import numpy as np
import pytest

from tests.harness.pool import RankFailure
from tests.strategies.cases import data
from tests.strategies.contract import training_cases as cases


@pytest.mark.parametrize("shuffle", [True, "batch", False])
@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_every_sample_is_used_once_per_epoch(ranks, size, shuffle):
    """Although every rank has a different seed."""
    by_rank = ranks.run_sizes((size,), cases.samples_by_epoch, shuffle)[size]
    epochs = [sum(parts, []) for parts in zip(*by_rank, strict=True)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(96))
    orders = {tuple(epoch) for epoch in epochs}
    assert len(orders) == (len(epochs) if shuffle else 1), "Each epoch has a new order."


def test_the_order_does_not_depend_on_the_number_of_ranks(ranks):
    results = ranks.run_sizes((1, 3), cases.samples_by_epoch, True)
    (one,), by_rank = results[1], results[3]
    for epoch, parts in zip(one, zip(*by_rank, strict=True), strict=True):
        batches = [sum((list(p[i : i + 4]) for p in parts), []) for i in range(0, 32, 4)]
        assert sum(batches, []) == epoch


def test_gradients_are_clipped_after_the_exchange(ranks):
    for size in (1, 2, 3):
        for norm in ranks(size).run(cases.clipped_update_norm):
            assert norm == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("size", "devices"),
    [
        pytest.param(3, 1, marks=pytest.mark.slow),
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_an_overflow_on_one_replica_skips_the_step_on_all(ranks, size, devices):
    replicas = size * devices
    for replica in range(replicas):
        row = replica * 12 // replicas
        for result in ranks(size).run(cases.overflow_on, row, devices):
            first, second, third = result["steps"]
            assert second["scale"] == first["scale"] / 2
            assert second["iterations"] == first["iterations"] == 1
            assert third["iterations"] == 2
            for a, b in zip(first["weights"], second["weights"], strict=True):
                assert a.tobytes() == b.tobytes()
            assert all(np.isfinite(w).all() for w in third["weights"])


def test_float16_without_overflow_takes_every_step(ranks):
    for result in ranks(2).run(cases.overflow_on, None):
        assert [step["iterations"] for step in result["steps"]] == [1, 2, 3]


def test_batch_logs_cover_the_global_batch(ranks):
    (one,) = ranks(1).run(cases.batch_logs)
    for logs in ranks(3).run(cases.batch_logs):
        assert len(logs) == len(one) == 5
        for expected, log in zip(one, logs, strict=True):
            assert log == pytest.approx(expected, rel=1e-5)


def test_chief_can_read_a_metric_alone(ranks):
    first, second = ranks(2).run(cases.metric_read_by_the_chief_alone)
    assert first > 0
    assert second is None


def test_moving_statistics_are_averaged_by_rows(ranks):
    x, _ = data(7)
    for size in (1, 2, 3):
        parts = [x[-(-i * 7 // size) : -(-(i + 1) * 7 // size)] for i in range(size)]
        variance = sum(len(p) / 7 * p.var(0) for p in parts)
        for result in ranks(size).run(cases.moving_statistics):
            np.testing.assert_allclose(result["mean"], 0.5 * x.mean(0), rtol=1e-5)
            np.testing.assert_allclose(result["variance"], 0.5 + 0.5 * variance, rtol=1e-5)


def test_strategy_reports_rank_and_size(ranks):
    assert ranks(1).run(cases.identity) == [(0, 1, True, (1, 0, 1))]
    assert ranks(2).run(cases.identity) == [(0, 2, True, (2, 0, 2)), (1, 2, False, (2, 1, 2))]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sharded dataset", r"`Dataset.shard` must be left out.*\.shard\(2, 0\)"),
        ("loop shuffles without a seed", "`Dataset.shuffle` must have a seed"),
        ("model made outside", "model must be made in the strategy's scope"),
        ("compiled inside", "model must be made in the strategy's scope"),
        ("forgotten scope", "model must be made in the strategy's scope.* on rank [01]"),
        ("model built outside", "Weights must be made in the strategy's scope"),
        ("other seeds", "must be the same on all 2 ranks.* different data on rank 1"),
        (
            "other arrays",
            "on all 2 ranks.* different data on rank 1: values of .* on rank 1, values",
        ),
        ("horovod optimizer", "`optimizer` must be a plain Keras optimizer"),
        ("horovod callback", "Received: MetricAverageCallback"),
        ("optimizer made outside", "must be made in the strategy's scope"),
        ("distributed from function", "`x` must be arrays, a dataset of global batches, or"),
        ("distributed by another", "`x` must be arrays, .* DistributedDataset, made by .* another"),
        ("an iterator", "Received: DistributedIterator"),
    ],
)
def test_misuse_is_an_error_on_every_rank(ranks, kind, message):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.wrong_use, kind)
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        line = " ".join(error.split())
        assert re.search(message.replace("0\\)", "[01]\\)"), line), line


def test_a_default_rate_times_size_is_warned_about_in_code_with_horovod(ranks):
    chief, other = ranks(2).run(cases.warnings_of_multiplied_rate, True)
    assert "Adam's default times the number of processes (0.001 × 2)" in chief
    assert "default times" not in other


def test_a_rate_that_happens_to_be_a_multiple_is_not_warned_about(ranks):
    """0.002 is a usual rate of Adam: `recipes/text.py` uses it."""
    for warned in ranks(2).run(cases.warnings_of_multiplied_rate, False):
        assert "default times" not in warned
