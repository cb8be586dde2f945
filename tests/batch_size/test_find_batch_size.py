"""Checks the search for the largest batch that fits in memory, with real trials."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdml
from tests.batch_size import cases
from tests.harness.pool import RankFailure
from tfdml.batch_size.bisection import largest_fitting
from tfdml.batch_size.trial import TrialOutcome
from tfdml.batch_size.trial_process import TrialProcess

EACH = np.ones((20, 4), np.float32), np.ones((20, 1), np.float32)


@pytest.mark.parametrize("start", [1, 32, 1000])
@pytest.mark.parametrize("most", [1, 2, 31, 32, 100, 1023, 5000])
def test_bisection(start, most):
    """An eighth is precise enough, and few trials are needed."""
    tried = []

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= most

    found = largest_fitting(fits, start, least=1, limit=4096)
    assert found in tried
    assert found <= min(most, 4096) <= max(found + 1, found * 9 / 8)
    assert len(tried) == len(set(tried)) <= 17


def test_bisection_without_an_answer():
    assert largest_fitting(lambda rows: rows < 2, start=8, least=2, limit=64) == 0
    assert largest_fitting(lambda rows: True, start=8, least=1, limit=1) == 1


@pytest.mark.parametrize("kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)])
def test_ranks_agree(ranks, kind):
    """Rank 1 has less memory: the kernel kills its process. A trial has half as many rows again."""
    ends = [(1000, "killed"), (45, "killed")]
    assert ranks(2, kind).run(cases.found, ends, 0.5, 60, 66) == [60, 60]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["resources", "allocation"])
def test_failed_allocations_end_a_trial(ranks, end):
    """Those of TensorFlow's operations, and of Python's."""
    assert ranks(1).run(cases.found, [(100, end)], 0.0, 64, 256) == [96]


@pytest.mark.slow
def test_batches_are_as_large_as_memory(ranks):
    """The rank with less memory counts; a row takes 1 MB, and is there several times."""
    small, large = (ranks(1).run(cases.found_in_memory, [n])[0] for n in (500, 1000))
    assert 50 <= small < 0.7 * large < 700
    one, other = ranks(2).run(cases.found_in_memory, [1000, 500])
    assert one == other == pytest.approx(2 * small, rel=0.2)


@pytest.mark.slow
def test_an_error_of_the_program_ends_the_search_on_all_ranks(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.found, [(1000, "killed"), (20, "error")], 0.0, 32, 64)
    assert set(failure.value.errors) == {0, 1}
    for text in failure.value.errors.values():
        assert "A trial of a batch of 64 rows has failed on rank 1, not for lack" in text
        assert "KeyError: 'no such column'" in text


@pytest.mark.slow
def test_nothing_fits(ranks):
    with pytest.raises(RankFailure, match="MemoryError: A batch of 1 rows, one for each replica"):
        ranks(1).run(cases.found, [(0, "allocation")], 0.0, 2, 64)


def test_trials_hold_what_exchanges_take(ranks):
    assert ranks(1).run(cases.gradient_copies, None) == [0]
    assert ranks(2).run(cases.gradient_copies, None) == [1, 1]
    assert ranks(2).run(cases.gradient_copies, "int8") == [2, 2]


def _find(strategy: tf.distribute.Strategy | None = None, data: object = EACH, **options) -> int:
    own = strategy or tfdml.MirroredStrategy(["CPU:0"])
    return tfdml.find_batch_size(cases.build, data, own, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": lambda rows: EACH}, "`limit` must be given if `data` is a function"),
        ({"data": EACH[0]}, r"`data` must be a tuple .* Received: data of type ndarray"),
        ({"data": (EACH[0], EACH[1][:3])}, r"Received: arrays of \[3, 20\] rows"),
        ({"data": (np.ones((0, 4)), np.ones((0, 1)))}, "and at least one"),
        ({"start": 0}, "`start` must be a positive integer. Received: start=0. .* of rows"),
        ({"limit": True}, "`limit` must be a positive integer. Received: limit=True"),
        ({"memory_limit": 1e9}, "`memory_limit` must be .* Pass a number of bytes"),
        ({"margin": 1.0}, "`margin` must be from 0 to below 1. Received: margin=1.0"),
        ({"noise_scale": 0.5}, "`noise_scale` must be a number of rows from 1"),
        ({"noise_scale": tfdml.callbacks.GradientNoiseScale()}, "of which the batch is None"),
        ({"strategy": tf.distribute.MirroredStrategy(["CPU:0"])}, "synchronous strategy of tfdml"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        _find(**options)


def test_functions_that_cannot_be_copied_are_refused():
    strategy = tfdml.MirroredStrategy(["CPU:0"])

    def build() -> keras.Model:
        with strategy.scope():
            return cases.build()

    with pytest.raises(ValueError, match="Functions must not use a strategy"):
        tfdml.find_batch_size(build, EACH, strategy)


def test_strategies_that_divide_what_a_trial_does_not_are_refused(ranks):
    with pytest.raises(RankFailure, match="must not have `sharding`, `pipeline` or `local_upd"):
        ranks(2).run(cases.found_with_sharding)


def test_larger_batches_than_pay_are_not_tried(monkeypatch):
    """By a number of rows, or by a callback's estimate."""
    tried = []
    monkeypatch.setattr(
        TrialProcess, "run", lambda self, rows: tried.append(rows) or TrialOutcome(rows <= 1000)
    )
    noise = tfdml.callbacks.GradientNoiseScale()
    monkeypatch.setattr(noise, "suggested_batch_size", lambda: 512)
    assert _find(limit=4096, noise_scale=noise, margin=0) == 512 == max(tried)
    assert _find(limit=4096, noise_scale=100.5, margin=0) == 100
    assert _find(limit=4096, margin=0) == 960
