"""Checks that the codec state of one model does not affect the training of another."""

import pytest

from tests.compression import several_models_cases as cases


def _assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", ["horovod", pytest.param("mirrored", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("codec", "accumulation"),
    [
        ("OneBit", 2),
        pytest.param("OneBit", None, marks=pytest.mark.slow),
        pytest.param("PowerSGD", None, marks=pytest.mark.slow),
        pytest.param("PowerSGD", 2, marks=pytest.mark.slow),
    ],
)
def test_alternating_models_train_as_each_alone(ranks, kind, codec, accumulation):
    """Also after saving, and restoring under another strategy."""
    alone = ranks(2, kind).run(cases.in_turn, False, codec, accumulation)
    for resumed in (False, True):
        in_turn = ranks(2, kind).run(cases.in_turn, True, codec, accumulation, resumed)
        for one, other in zip(alone, in_turn, strict=True):
            _assert_same_bits(one, other)


@pytest.mark.slow
def test_new_observers_lose_no_accumulated_gradients(ranks):
    for one, other in zip(
        ranks(2).run(cases.watched, False), ranks(2).run(cases.watched, True), strict=True
    ):
        _assert_same_bits(one, other)


def test_new_optimizer_begins_without_state(ranks):
    for one, other in zip(
        ranks(2).run(cases.compiled_again), ranks(2).run(cases.compiled_once), strict=True
    ):
        _assert_same_bits(one, other)


@pytest.mark.parametrize("as_before", [pytest.param(False, marks=pytest.mark.slow), True])
def test_state_of_two_optimizers_is_resumed(ranks, as_before):
    """Also from checkpoints whose names of the state do not name the optimizer."""
    whole = ranks(2).run(cases.two_optimizers_go_on, False)
    resumed = ranks(2).run(cases.two_optimizers_go_on, True, as_before)
    for one, other in zip(whole, resumed, strict=True):
        _assert_same_bits(one, other)
