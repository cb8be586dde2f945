"""Checks that in the scope, outside of a step, everything equals one process."""

import numpy as np
import pytest

from tests.harness.pool import RankFailure
from tests.strategies.compare import assert_close, assert_invariant
from tests.strategies.seam import scope_cases as cases

EXACT = {"rtol": 1e-6, "atol": 1e-6}
# Three replicas: with two, an error by a factor of two could cancel.
JOBS = [
    ("horovod", 3),
    pytest.param("mirrored", 3, marks=pytest.mark.slow),
    pytest.param("multi_worker", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "size"), JOBS)
@pytest.mark.parametrize(
    "case",
    [
        (cases.losses_and_metrics,),
        (cases.metric_of_a_model,),
        (cases.update_outside,),
        (cases.saved_by_rank_0,),
        (cases.exported, True),
        pytest.param((cases.exported, False), marks=pytest.mark.slow),
        (cases.mapped_layers,),
        (cases.made_outside, "scope"),
        (cases.made_outside, "optimizers"),
        (cases.made_outside, "schedule"),
        pytest.param((cases.made_outside, "compile"), marks=pytest.mark.slow),
        pytest.param((cases.made_outside, "batches"), marks=pytest.mark.slow),
        (cases.cleared,),
        (cases.cloned, True),
        pytest.param((cases.cloned, False), marks=pytest.mark.slow),
        (cases.read_outside, "keras"),
        (cases.read_outside, "clone"),
        (cases.read_outside, "batches"),
        pytest.param((cases.read_outside, "subclassed"), marks=pytest.mark.slow),
        pytest.param((cases.read_outside, "h5"), marks=pytest.mark.slow),
    ],
    ids=lambda case: "-".join(getattr(part, "__name__", str(part)) for part in case),
)
def test_results_equal_one_process(ranks, kind, size, case):
    assert_invariant(ranks.run_sizes((1, size), *case, kind=kind), **EXACT)


@pytest.mark.parametrize(("kind", "size"), JOBS)
def test_a_loss_scale_made_outside(ranks, kind, size):
    results = ranks.run_sizes((1, size), cases.made_outside, "float16", kind=kind)
    assert_invariant(results, rtol=2e-2, atol=2e-3)


def test_losses_and_metrics_are_plain_values(ranks):
    """Not only equal for any number of replicas, but correct."""
    (found,) = ranks(3, "mirrored").run(cases.losses_and_metrics)
    assert found["loss"] == 1.0
    assert_close(found["in a replica"], 1.0)
    assert found["counts"].tolist() == [[4.0, 0.0], [2.0, 2.0]]
    assert_close(found["average"], 3.0)


def test_exported_model_equals_the_model(ranks):
    for found in ranks(2, "mirrored").run(cases.exported, True):
        assert_close(found["predicted"], found["served"])


@pytest.mark.parametrize(("kind", "size"), JOBS)
def test_variables_convert_to_numbers(ranks, kind, size):
    ranks(size, kind).run(cases.numbers_of_variables)


def test_other_gradients_outside_of_a_step_are_refused_on_all_ranks(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.other_updates)
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        assert "must be the same on all 2 ranks" in error
        assert "Call `apply` in `strategy.run`" in error


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_outside_of_a_step(ranks, scaled):
    for found in ranks(2, "mirrored").run(cases.accumulated_outside, scaled):
        firsts = [value[0] for value in found["values"]]
        np.testing.assert_allclose(firsts, [1.0, 0.8, 0.8, 0.3], rtol=1e-6)
        np.testing.assert_allclose(found["weights"][0], [0.2, 1.8], rtol=1e-6)
