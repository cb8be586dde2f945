"""Checks that synchronous parameter servers meet the strategies' contract, and whom they await."""

import numpy as np
import pytest

from tests.strategies import cases
from tests.strategies.compare import assert_close
from tests.strategies.contract import model_cases
from tests.strategies.parameter_server import synchronous_cases as synchronous
from tests.strategies.seam import scope_cases


def _compare(ranks, cluster, case, *args, **tolerance):
    """Runs a case of `test_replica_invariance` on one process and on two workers."""
    (one,) = ranks(1).run(case, *args)
    assert_close(one, cluster.run(case, *args), **tolerance)


@pytest.mark.parametrize(
    "case",
    [
        (cases.fit_arrays, 101, 16),
        # The last batch has one row: one of the workers gets none of it.
        (cases.fit_arrays, 33, 16, 3, "convolutional"),
        pytest.param((cases.fit_arrays, 33, 16, 3, "subclassed"), marks=pytest.mark.slow),
        pytest.param((cases.fit_dataset, "shuffled"), marks=pytest.mark.slow),
        pytest.param((cases.fit_dataset, "repeated"), marks=pytest.mark.slow),
        pytest.param((cases.fit_dataset, "generator"), marks=pytest.mark.slow),
        pytest.param((cases.fit_dataset, "unknown_cardinality"), marks=pytest.mark.slow),
        pytest.param((cases.fit_dataset, "weighted"), marks=pytest.mark.slow),
        pytest.param((cases.train_on_batches,), marks=pytest.mark.slow),
        pytest.param((cases.masked_loss, "sum_over_batch_size"), marks=pytest.mark.slow),
        (cases.masked_loss, "mean_with_sample_weight"),
        pytest.param((cases.scalar_loss,), marks=pytest.mark.slow),
        (model_cases.added_loss,),
        pytest.param((model_cases.several_outputs,), marks=pytest.mark.slow),
        pytest.param((model_cases.many_metrics,), marks=pytest.mark.slow),
        (scope_cases.read_outside, "keras"),
        pytest.param((scope_cases.read_outside, "clone"), marks=pytest.mark.slow),
        pytest.param((scope_cases.read_outside, "batches"), marks=pytest.mark.slow),
    ],
    ids=lambda case: "-".join(getattr(part, "__name__", str(part)) for part in case),
)
def test_two_workers_equal_one_process(ranks, cluster, case):
    _compare(ranks, cluster, *case)


def test_float64(ranks, cluster):
    _compare(ranks, cluster, cases.fit_float64, "dense", rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_steps_per_execution(ranks, cluster, steps):
    case = (cases.fit_arrays, 33, 8, 2, "dense", 1, {"steps_per_execution": steps})
    _compare(ranks, cluster, *case)


def test_every_worker_takes_part(cluster):
    assert cluster.run(synchronous.workers_of_each_step) == [[0, 1]] * 8


def test_state_of_layers(cluster):
    """`BatchNormalization` updates once per step, seeds count steps, workers draw differently."""
    result = cluster.run(synchronous.stateful)
    assert result["seeds"] == [6]
    assert np.isfinite(result["moving_mean"]).all()
    assert np.abs(result["moving_mean"]).max() > 0
    assert result["masks_differ"]


def test_the_slowest_is_not_waited_for(cluster):
    result = cluster.run(synchronous.backup_worker)
    assert result["iterations"] == 12
    # Half of each batch is in the update: the share of one of the two workers.
    assert result["samples"] == 12 * 4


def test_loss_scaling(ranks, cluster):
    (one,) = ranks(1).run(synchronous.loss_scaling)
    many = cluster.run(synchronous.loss_scaling)
    assert many["scale"] == one["scale"] == 512.0
    assert many["iterations"] == one["iterations"] == 7
    assert_close(one["weights"], many["weights"], rtol=2e-3, atol=2e-3)


def test_accumulated_gradients(ranks, cluster):
    _compare(ranks, cluster, synchronous.accumulation)
