"""What a codec keeps of one model's gradients changes no other model's training."""

import pytest

from tests.compression import several_models_cases as cases


def _assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", ["horovod", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_a_model_trained_in_turn_with_another_trains_as_alone(ranks, kind):
    pairs = zip(
        ranks(2, kind).run(cases.in_turn, False),
        ranks(2, kind).run(cases.in_turn, True),
        strict=True,
    )
    for alone, in_turn in pairs:
        _assert_same_bits(alone, in_turn)


@pytest.mark.parametrize("as_before", [False, True])
def test_two_optimizers_of_a_model_go_on(ranks, as_before):
    """From checkpoints, too, that hold what all optimizers keep under names without theirs."""
    whole = ranks(2).run(cases.two_optimizers_go_on, False)
    resumed = ranks(2).run(cases.two_optimizers_go_on, True, as_before)
    for one, other in zip(whole, resumed, strict=True):
        _assert_same_bits(one, other)
