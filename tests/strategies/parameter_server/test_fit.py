"""Checks parameter servers under plain `fit` on a cluster of real processes."""

import numpy as np
import pytest

from tests.strategies.parameter_server import cases as cases


def test_no_update_is_lost(cluster):
    result = cluster.run(cases.fit_asynchronously)
    assert result["iterations"] == 3 * cases.STEPS
    assert result["samples"] == [cases.STEPS * cases.BATCH] * 3
    assert [counter for _, counter in result["seeds"]] == [3 * cases.STEPS]
    assert result["loss"][-1] < result["loss"][0]
    assert {"accuracy", "loss", "val_accuracy", "val_loss"} <= set(result["keys"])
    assert [b for b, _ in result["batches"]] == list(range(cases.STEPS)) * 3
    assert all(names == ["accuracy", "loss", "samples"] for _, names in result["batches"])
    assert len(result["devices"]) == 2, "variables are spread over the servers"


def test_each_step_counts_once_with_few_result_rows(cluster):
    result = cluster.run(cases.fit_with_few_rows)
    assert result["samples"] == [cases.STEPS * cases.BATCH] * 2
    assert result["rows"] == 4, "as many tasks as may be on their way, and all are free again"


def test_a_coordinator_stops_at_the_end_of_the_program(cluster):
    """A thread that is started then waits for good, and the chief with it."""
    cluster.run(cases.stopped_at_the_end)


def test_losses_added_by_layers_count(cluster):
    result = cluster.run(cases.loss_of_layers)
    assert result["fit"] > 10
    assert result["evaluate"] > 10


def test_result_row_is_freed_after_reading(cluster):
    result = cluster.run(cases.results_in_a_table)
    assert result["taken"] == [0, 1, 2]
    assert result["read"] == [[2, 20], [1, 10]]
    assert result["full"] == [True, False]
    assert result["then"] == [2, 1]


def test_evaluate_and_predict_see_each_sample_once(cluster, tmp_path):
    result = cluster.run(cases.evaluate_and_predict, str(tmp_path))
    plain = result["plain"]
    assert plain["strategy"] == "_DefaultDistributionStrategy"
    assert plain["iterations"] == 10
    for name in ("evaluate", "evaluate_generator"):
        np.testing.assert_allclose(result[name], plain["evaluate"], rtol=1e-5)
    for name in ("predict", "predict_on_batch"):
        np.testing.assert_allclose(result[name], plain["predict"], rtol=1e-5, atol=1e-6)


def test_busy_workers_lose_nothing(cluster):
    assert set(cluster.run(cases.count_many).values()) == {cases.COUNTED_STEPS * cases.PER_STEP}


def test_busy_workers_lose_no_rows(cluster):
    assert cluster.run(cases.count_in_rows) == [cases.COUNTED_STEPS * cases.PER_STEP]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "count"),
    [("Variable.assign_add", "count"), ("SeedGenerator.next", "seeds")],
)
def test_unpatched_keras_functions_lose_updates(cluster, part, count):
    """Makes sure that the test above can fail."""
    assert cluster.run(cases.count_many, part)[count] < cases.COUNTED_STEPS * cases.PER_STEP


@pytest.mark.slow
def test_unpatched_sparse_updates_lose_updates(cluster):
    """Makes sure that the test of rows can fail."""
    counted = cluster.run(cases.count_in_rows, "TFOptimizer.assign_sub")
    assert counted[0] < cases.COUNTED_STEPS * cases.PER_STEP, counted


def test_staleness_is_bounded(cluster):
    seen = cluster.run(cases.staleness, 0)
    assert max(seen) == 0
    assert max(cluster.run(cases.staleness, None)) > 0


def test_arrays_and_functions_as_data(cluster):
    result = cluster.run(cases.other_data)
    assert result["arrays"] == 2 * 13
    assert result["function"] == 20
    assert result["steps_per_execution"] == 20
    assert result["on_batch"] == 1


def test_workers_share_a_pass_over_the_data(cluster):
    seen = cluster.run(cases.rows_read_by_each_worker)
    assert sorted(seen[0] + seen[1]) == list(range(96))


@pytest.mark.parametrize("kind", ["generator", "py_function", "pydataset", "from_generator"])
def test_data_that_cannot_be_sent(cluster, kind):
    message = cluster.run(cases.unsendable, kind)
    assert "the workers read" in message
    assert "Read files with TensorFlow's own datasets" in message


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no steps_per_epoch", "`steps_per_epoch` must be given"),
        ("run_eagerly", "`run_eagerly` must be False"),
        ("jit_compile", "`jit_compile` must not be True"),
        ("accumulation", "`gradient_accumulation_steps` must be None in asynchronous"),
        ("optimizer outside", "`optimizer` must be made in the strategy's scope"),
        ("another cluster", "`cluster_resolver` must describe the cluster that this process"),
        ("backup workers", "`backup_workers` must be fewer than there are workers"),
    ],
)
def test_unsupported_calls_are_refused_before_a_step(cluster, kind, words):
    assert words in cluster.run(cases.refused, kind)


def test_optimizer_created_outside_is_recreated_in_the_scope(cluster):
    assert cluster.run(cases.optimizer_made_outside) == 5


def test_an_error_of_a_step_ends_fit_and_the_next_one_runs(cluster):
    first, second = cluster.run(cases.step_that_fails)
    assert "the label is wrong" in first
    assert second == 5
