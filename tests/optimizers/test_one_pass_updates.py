"""Checks that updates in one pass have the bits of Keras's own operations."""

import pytest

from tests.optimizers import one_pass_cases as cases


def _compared(ranks, size, *args, **options) -> int:
    """Returns the number of updates in one pass, if they have the bits of Keras's."""
    keras_own = ranks(size, **options).run(cases.trained, args[0], False, *args[1:])
    ours = ranks(size, **options).run(cases.trained, args[0], True, *args[1:])
    for before, after in zip(keras_own, ours, strict=True):
        assert before["one pass"] == 0
        assert after["values"] == before["values"]
    return ours[0]["one pass"]


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_bits_are_those_of_keras(ranks, optimizer):
    # Kernels and biases of two layers; the embedding's gradient is sparse.
    assert _compared(ranks, 2, optimizer) == (0 if optimizer == "amsgrad" else 4)


@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
@pytest.mark.parametrize("optimizer", ["nesterov", "AdamW"])
@pytest.mark.slow
def test_bits_are_those_of_keras_on_devices(ranks, kind, optimizer):
    assert _compared(ranks, 2, optimizer, kind=kind) == (8 if kind == "mirrored" else 4)


@pytest.mark.parametrize("optimizer", ["nesterov", "Adam"])
@pytest.mark.slow
def test_loss_scale_and_overflow(ranks, optimizer):
    assert _compared(ranks, 2, optimizer, "mixed_float16") == 4


@pytest.mark.slow
def test_float64(ranks):
    assert _compared(ranks, 2, "nesterov", "float64") == 4
    assert _compared(ranks, 2, "Adam", "float64") == 0


def test_an_update_waits_for_its_own_bucket_alone(ranks):
    for found in ranks(2).run(cases.awaited_exchanges):
        assert found == [1, 1, 1]


def test_one_replica_takes_keras_own_update(ranks):
    (result,) = ranks(1).run(cases.trained, "momentum", True)
    assert result["one pass"] == 0
