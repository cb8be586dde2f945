"""Checks `jit_compile=True`: XLA compiles a replica's step without the update."""

import pytest

from tests.harness.pool import RankFailure
from tests.strategies import cases
from tests.strategies.compare import assert_invariant, assert_same_bits
from tests.strategies.contract import compiled_cases, custom_cases, fit_cases, model_cases
from tests.strategies.contract.compiled_cases import by_xla


@pytest.mark.parametrize(
    ("case", "args"),
    [
        # The last batch has one row: one rank computes, and the others' shares are padded.
        (cases.fit_arrays, (33, 16, 3, "dense", 1, {"steps_per_execution": 2})),
        pytest.param(cases.fit_arrays, (49, 16, 2, "convolutional"), marks=pytest.mark.slow),
        pytest.param(cases.fit_arrays, (49, 16, 2, "subclassed"), marks=pytest.mark.slow),
        pytest.param(cases.fit_dataset, ("weighted",), marks=pytest.mark.slow),
        pytest.param(cases.train_on_batches, (), marks=pytest.mark.slow),
        pytest.param(model_cases.several_outputs, (), marks=pytest.mark.slow),
        pytest.param(model_cases.sparse_gradients, (), marks=pytest.mark.slow),
        pytest.param(model_cases.variables_without_gradient, (), marks=pytest.mark.slow),
        pytest.param(model_cases.added_loss, (), marks=pytest.mark.slow),
        pytest.param(
            fit_cases.optimizer,
            ("AdamW", {"weight_decay": 0.1, "global_clipnorm": 0.1}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_results_equal_one_process(ranks, case, args):
    assert_invariant(ranks.run_sizes((1, 3), by_xla, case, *args))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_every_strategy(ranks, kind):
    assert_invariant(ranks.run_sizes((1, 2), by_xla, cases.fit_arrays, 33, 16, kind=kind))


@pytest.mark.slow
def test_several_devices_compiled_equal_uncompiled(ranks):
    plain = ranks(1).run(cases.fit_arrays, 33, 16)
    args = (33, 16, 3, "dense", 2)
    assert_invariant({1: plain, 2: ranks(2).run(by_xla, cases.fit_arrays, *args)})


def test_which_methods_are_compiled(ranks):
    for found in ranks(2).run(compiled_cases.methods_compiled_by_xla):
        assert found == ["train, True: True", "test, True: True", "predict, True: True"]


def test_state_of_layers_when_compiled(ranks):
    assert_same_bits(ranks(2).run(by_xla, cases.fit_arrays, 49, 16, 2, "stateful"))


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_compressed(ranks, name):
    assert_same_bits(ranks(2).run(compiled_cases.compressed, name))


def test_custom_apply_is_called_once(ranks):
    assert_invariant(ranks.run_sizes((1, 2), compiled_cases.own_apply))


def test_gradients_of_several_steps(ranks):
    assert_invariant(ranks.run_sizes((1, 2), compiled_cases.gathered, 3))


def test_a_loss_scale(ranks):
    results = ranks.run_sizes((1, 2), compiled_cases.scaled)
    assert_invariant(results, rtol=1e-2, atol=1e-2)
    assert results[2][0]["updates"] == results[1][0]["updates"] > 0


@pytest.mark.parametrize(
    ("case", "args", "words"),
    [
        (custom_cases.several_optimizers, (), "custom `train_step`"),
        (model_cases.synchronized_batch_norm, (), "exchange something in the middle"),
        (cases.masked_loss, ("sum_over_batch_size",), "exchange something in the middle"),
    ],
)
def test_uncompilable_models_are_refused(ranks, case, args, words):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(by_xla, case, *args)
    assert sorted(failure.value.errors) == [0, 1]
    assert "`jit_compile` must not be True" in failure.value.errors[1]
    assert words in failure.value.errors[1]
