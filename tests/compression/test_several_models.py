"""What a codec keeps of one model's gradients changes no other model's training."""

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
def test_a_model_trained_in_turn_with_another_trains_as_alone(ranks, kind, codec, accumulation):
    """Also where it is saved, and taken up under another strategy."""
    alone = ranks(2, kind).run(cases.in_turn, False, codec, accumulation)
    for resumed in (False, True):
        in_turn = ranks(2, kind).run(cases.in_turn, True, codec, accumulation, resumed)
        for one, other in zip(alone, in_turn, strict=True):
            _assert_same_bits(one, other)


def test_observers_come_and_nothing_gathered_is_lost(ranks):
    for one, other in zip(
        ranks(2).run(cases.watched, False), ranks(2).run(cases.watched, True), strict=True
    ):
        _assert_same_bits(one, other)


def test_another_optimizer_begins_with_nothing(ranks):
    for one, other in zip(
        ranks(2).run(cases.compiled_again), ranks(2).run(cases.compiled_once), strict=True
    ):
        _assert_same_bits(one, other)


@pytest.mark.parametrize("as_before", [False, True])
def test_two_optimizers_of_a_model_go_on(ranks, as_before):
    """From checkpoints, too, that hold what all optimizers keep under names without theirs."""
    whole = ranks(2).run(cases.two_optimizers_go_on, False)
    resumed = ranks(2).run(cases.two_optimizers_go_on, True, as_before)
    for one, other in zip(whole, resumed, strict=True):
        _assert_same_bits(one, other)
