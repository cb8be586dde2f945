"""Checks the contract: one replica's losses, metrics, weights and predictions on any number."""

import numpy as np
import pytest

from tests.harness.pool import RankFailure
from tests.strategies import cases
from tests.strategies.compare import assert_close, assert_invariant, assert_same_bits
from tests.strategies.contract import custom_cases

# Numbers of replicas: devices of one process in a mirrored job, otherwise processes.
# For parameter servers they are workers, and the chief is the only rank.
SIZES = {
    "horovod": (1, 2, 3),
    "mirrored": (1, 2),
    "multi_worker": (1, 2),
    "parameter_server": (1, 2),
}


def _compare(ranks, kind, case, *args, **tolerance):
    """Runs on all sizes: for the core of the contract."""
    assert_invariant(ranks.run_sizes(SIZES[kind], case, *args, kind=kind), **tolerance)


def _compare_largest(ranks, kind, case, *args):
    """Runs on one replica and on the largest number, whose shares differ."""
    assert_invariant(ranks.run_sizes((1, SIZES[kind][-1]), case, *args, kind=kind))


@pytest.mark.parametrize(
    ("rows", "batch"),
    [
        # Every batch divides by 2 and 3, as in `test_mixed_precision`.
        pytest.param(96, 12, marks=pytest.mark.slow),
        (101, 16),  # No batch divides, and the last one has 5 rows.
    ],
)
def test_arrays_with_ranks_seeded_differently(ranks, feature_kind, rows, batch):
    _compare_largest(ranks, feature_kind, cases.fit_arrays, rows, batch)


def test_arrays_whose_last_batch_has_one_row(ranks, kind):
    """All ranks but one have no row of the last batch."""
    _compare(ranks, kind, cases.fit_arrays, 33, 16)


@pytest.mark.parametrize(
    "model", ["convolutional", pytest.param("subclassed", marks=pytest.mark.slow)]
)
def test_models(ranks, feature_kind, model):
    _compare_largest(ranks, feature_kind, cases.fit_arrays, 33, 16, 3, model)


def test_one_process_equals_plain_keras(ranks):
    (plain,) = ranks(1).run(cases.fit_without_strategy)
    (ours,) = ranks(1).run(
        cases.fit_arrays, 101, 16, 3, "dense", 1, None, {"shuffle": False} | _validation()
    )
    assert_close(plain, ours, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)])
def test_two_processes_with_two_devices_each(ranks, kind):
    one = ranks.run_sizes((1,), cases.fit_arrays, 33, 16)
    assert_invariant(one | {2: ranks(2, kind).run(cases.fit_arrays, 33, 16, 3, "dense", 2)})


@pytest.mark.slow  # Two processes with two devices each also have four replicas.
def test_four_replicas(ranks, feature_kind):
    case = (cases.fit_arrays, 33, 16)
    assert_invariant(ranks.run_sizes((1, 4), *case, kind=feature_kind))


@pytest.mark.slow  # A mirrored job is the same, and runs it by default.
def test_one_process_with_two_devices(ranks):
    (one,) = ranks(1).run(cases.fit_arrays, 33, 16)
    (two,) = ranks(1).run(cases.fit_arrays, 33, 16, 3, "dense", 2)
    assert_close(one, two)


@pytest.mark.parametrize(
    "dataset",
    [
        "shuffled",
        pytest.param("repeated", marks=pytest.mark.slow),
        # Unknown length, which a test below covers for all strategies.
        pytest.param("generator", marks=pytest.mark.slow),
        # `test_each_part_is_needed` has it on 2 ranks.
        pytest.param("weighted", marks=pytest.mark.slow),
    ],
)
def test_datasets(ranks, feature_kind, dataset):
    _compare_largest(ranks, feature_kind, cases.fit_dataset, dataset)


def test_a_dataset_of_unknown_length(ranks, feature_kind):
    _compare_largest(ranks, feature_kind, cases.fit_dataset, "unknown_cardinality")


@pytest.mark.parametrize(
    "fit_options",
    [
        # `test_masks_and_reductions` covers sample weights, to which these are converted.
        pytest.param({"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}, marks=pytest.mark.slow),
        {"validation_split": 0.3, "shuffle": "batch"},
        # `test_masks_and_reductions` has sample weights too.
        pytest.param({"sample_weight": np.linspace(0, 2, 101)}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "+".join(options),
)
def test_fit_options(ranks, feature_kind, fit_options):
    case = (101, 16, 3, "dense", 1, None, fit_options)
    _compare_largest(ranks, feature_kind, cases.fit_arrays, *case)


@pytest.mark.parametrize(
    "compile_options",
    [{"steps_per_execution": 3}, pytest.param({"run_eagerly": True}, marks=pytest.mark.slow)],
    ids=lambda options: "+".join(options),
)
def test_compile_options(ranks, feature_kind, compile_options):
    case = (33, 8, 2, "dense", 1, compile_options)
    if feature_kind == "parameter_server" and "run_eagerly" in compile_options:
        with pytest.raises(RankFailure, match="`run_eagerly` must be False"):
            ranks(2, feature_kind).run(cases.fit_arrays, *case)
        return
    assert_invariant(ranks.run_sizes((1, 2), cases.fit_arrays, *case, kind=feature_kind))


def test_weights_stay_bit_identical_with_stateful_layers(ranks):
    results = ranks(3).run(cases.fit_arrays, 33, 16, 3, "stateful")
    assert_same_bits(results)
    assert all(np.isfinite(w).all() for w in results[0]["weights"])


def test_on_batch_methods(ranks, feature_kind):
    _compare_largest(ranks, feature_kind, cases.train_on_batches)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_masks_and_reductions(ranks, feature_kind, reduction):
    _compare_largest(ranks, feature_kind, cases.masked_loss, reduction)


@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_a_masked_loss_under_the_other_strategies(ranks, kind):
    # Three devices: replicas' threads alternate in the middle of a loss.
    sizes = (1, 3) if kind == "mirrored" else (1, 2)
    case = (cases.masked_loss, "mean_with_sample_weight")
    assert_invariant(ranks.run_sizes(sizes, *case, kind=kind))


def test_a_scalar_loss_is_a_mean(ranks, feature_kind):
    _compare_largest(ranks, feature_kind, cases.scalar_loss)


def test_float64(ranks, kind):
    _compare(ranks, kind, cases.fit_float64, "dense", rtol=1e-10, atol=1e-12)


@pytest.mark.slow  # `test_models` covers float32.
def test_float64_of_a_convolutional_model(ranks, feature_kind):
    _compare(ranks, feature_kind, cases.fit_float64, "convolutional", rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "kind",
    ["horovod", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mirrored", "multi_worker"))],
)
def test_a_custom_loop(ranks, kind):
    """On parameter servers the loop uses TensorFlow's `ClusterCoordinator`."""
    _compare(ranks, kind, custom_cases.custom_loop)


def _validation() -> dict:
    x, y = cases.data(101)
    return {"validation_data": (x[:50], y[:50])}
