"""Checks that features of Keras give the results of one replica under every strategy."""

import numpy as np
import pytest

from tests.harness.pool import RankFailure
from tests.strategies.compare import assert_invariant, assert_same_bits
from tests.strategies.contract import (
    custom_cases,
    data_cases,
    fit_cases,
    model_cases,
    training_cases,
)

# Numbers of replicas; three, so that shares differ, unless that is slow.
SIZE = {"horovod": 3, "mirrored": 2, "multi_worker": 2, "parameter_server": 2}


# Refused by synchronous parameter servers.
REFUSED = {
    model_cases.synchronized_batch_norm: "`synchronized` must be False",
    custom_cases.several_optimizers: "must apply the model's own optimizer once",
}


def _compare(ranks, kind, case, *args, **tolerance):
    if kind == "parameter_server" and case in REFUSED:
        with pytest.raises(RankFailure, match=REFUSED[case]):
            ranks(SIZE[kind], kind).run(case, *args)
        return
    assert_invariant(ranks.run_sizes((1, SIZE[kind]), case, *args, kind=kind), **tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("SGD", {"clipvalue": 0.01, "momentum": 0.9}, marks=pytest.mark.slow),
        ("SGD", {"clipnorm": 0.05}),
        ("AdamW", {"weight_decay": 0.1, "global_clipnorm": 0.1}),
        ("SGD", {"use_ema": True, "ema_momentum": 0.5}),
        # `test_each_part_is_needed` has a similar case on 2 ranks.
        pytest.param(
            "SGD",
            {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
            marks=pytest.mark.slow,
        ),
        ("Adam", {"gradient_accumulation_steps": 3}),
        pytest.param("schedule", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value,
)
def test_optimizers(ranks, feature_kind, name, options):
    _compare(ranks, feature_kind, fit_cases.optimizer, name, options)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(model_cases.many_metrics, marks=pytest.mark.slow),
        model_cases.synchronized_batch_norm,
        model_cases.sparse_gradients,
        model_cases.added_loss,
        pytest.param(model_cases.variables_without_gradient, marks=pytest.mark.slow),
        custom_cases.several_optimizers,
        # `test_each_part_is_needed` has it on 2 ranks.
        pytest.param(model_cases.several_outputs, marks=pytest.mark.slow),
        # `sparse_gradients` also covers masks, attention and a recurrent layer.
        pytest.param(model_cases.recurrent_and_attention, marks=pytest.mark.slow),
    ],
    ids=lambda case: case.__name__,
)
def test_models_and_losses(ranks, feature_kind, case):
    _compare(ranks, feature_kind, case)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_mixed_precision(ranks, feature_kind, policy):
    """The replicas' sums round differently in half precision, but identically on all ranks."""
    results = ranks.run_sizes((1, SIZE[feature_kind]), fit_cases.policy, policy, kind=feature_kind)
    assert_same_bits(results[SIZE[feature_kind]])
    assert_invariant(results, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("PyDataset", marks=pytest.mark.slow),
        pytest.param("PyDataset with workers", marks=pytest.mark.slow),
        pytest.param("endless PyDataset with workers", marks=pytest.mark.slow),
        "generator",
    ],
)
def test_python_data_is_read_by_rank_0(ranks, feature_kind, source):
    _compare(ranks, feature_kind, data_cases.python_data, source)


@pytest.mark.parametrize("kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)])
def test_failed_step_can_be_caught(ranks, kind):
    first, second = results = ranks(2, kind).run(data_cases.caught)
    assert_same_bits(results)
    assert first["history"]["loss"].tolist() == second["history"]["loss"].tolist()
    assert np.isfinite(first["history"]["loss"]).all()


def test_local_model_beside_a_distributed_one(ranks, feature_kind):
    """Under `tfdml.alone()` each process equals plain Keras; the other model is unaffected."""
    _compare(ranks, feature_kind, training_cases.alone_and_together)


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["column", "table"])
def test_pandas_data_frames(ranks, feature_kind, labels):
    _compare(ranks, feature_kind, data_cases.tables, labels)


@pytest.mark.parametrize("strategy", ["horovod", "multi_worker"])
def test_ranks_read_their_own_shards(ranks, strategy):
    assert_invariant(ranks.run_sizes((1, 2), data_cases.sharded_input, kind=strategy))


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("other bits", ["Received a different batch on ranks: 1. Seed what draws"] * 2),
        ("fewer batches", ["the end of the data on rank 1 after 3 batches"] * 2),
        ("no part", ["no batch on rank 1"] * 2),
    ],
)
def test_inconsistent_data_are_an_error_on_every_rank(ranks, what, messages):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(data_cases.wrong_data, what)
    for rank, message in enumerate(messages):
        assert message in failure.value.errors[rank]


def test_data_that_fail_on_one_rank_are_an_error_on_all(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(data_cases.wrong_data, "an error")
    errors = failure.value.errors
    assert "the file is gone" in errors[0]
    assert "an error on rank 0 instead of batch 3, so rank 1 ends too" in errors[1]


def test_dropout_masks_differ_between_replicas_and_follow_the_seed(ranks, feature_kind):
    size = SIZE[feature_kind]

    def draw() -> np.ndarray:
        drawn = ranks(size, feature_kind).run(training_cases.dropout_masks)
        return np.concatenate([np.concatenate(masks) for masks in drawn])

    masks, again = draw(), draw()
    assert len({mask.tobytes() for mask in masks}) == len(masks) == 2 * size
    assert sorted(m.tobytes() for m in masks) == sorted(m.tobytes() for m in again)


@pytest.mark.parametrize(
    ("why", "epochs", "rate"),
    [
        ("nan", 1, 0.01),
        pytest.param("early", 2, 0.01, marks=pytest.mark.slow),
        ("plateau", 6, 1e-7),
        ("one rank", 2, 0.01),
    ],
)
def test_callbacks_make_the_same_decisions_on_all_ranks(ranks, why, epochs, rate):
    for result in ranks(3).run(fit_cases.stops, why):
        assert result == {"epochs": epochs, "rate": pytest.approx(rate, rel=1e-4)}


def test_only_rank_0_writes(ranks, tmp_path):
    chief, other = ranks(2).run(fit_cases.files, str(tmp_path))
    assert chief == ["backup", "board", "log.csv", "model.keras"]
    assert other == []


def test_a_saved_model_needs_no_tfdml(ranks, tmp_path):
    path = str(tmp_path / "model.keras")
    expected, *_ = ranks(2).run(fit_cases.saved, path)
    np.testing.assert_array_equal(fit_cases.loaded_elsewhere(path), expected)


def test_beginners_mnist_tutorial(ranks, kind):
    """Dense 128, Dense 10, Adam, batches of 256."""
    _compare(ranks, kind, model_cases.tutorial)
