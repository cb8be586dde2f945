"""Checks the README's column "today": Keras 3 without tfdml. A failure here is good news."""

import numpy as np
import pytest

from tests.harness.pool import RankFailure
from tests.strategies.upstream import cases as today

# No change of tfdml can make these fail: only a new Keras, TensorFlow or Horovod.
pytestmark = pytest.mark.slow


def test_horovods_broadcast_callback_crashes(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(today.horovod_optimizer, True)
    assert sorted(failure.value.errors) == [0, 1]
    assert "'Variable' object has no attribute 'ref'" in failure.value.errors[0]


def test_horovods_optimizer_exchanges_nothing(ranks):
    first, second = ranks(2).run(today.horovod_optimizer, False)
    assert max(np.abs(a - b).max() for a, b in zip(first, second, strict=True)) > 1e-3


def test_clipping_before_the_sum_makes_the_update_too_long(ranks):
    assert ranks(1).run(today.clipped_update_norm) == [pytest.approx(2.0, rel=1e-3)]


def test_uneven_batches_give_different_weights(ranks):
    assert ranks(1).run(today.uneven_batches)[0] > 1e-3


def test_an_overflow_on_the_second_replica_goes_into_the_weights(ranks):
    assert ranks(1).run(today.overflow_on_the_second_replica) == [False]


def test_a_seeded_shuffle_has_the_same_order_every_epoch(ranks):
    assert ranks(1).run(today.seeded_orders) == [True]


def test_each_process_shuffles_for_itself(ranks):
    first, second = ranks(2).run(today.samples_without_agreement)
    assert sorted(first + second) != list(range(96))


def test_multi_worker_mirrored_crashes_in_fit(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2, "multi_worker").run(today.multi_worker_fit)
    assert sorted(failure.value.errors) == [0, 1]
    assert "with an unsupported type" in failure.value.errors[0]


def test_gradient_accumulation_crashes(ranks):
    with pytest.raises(RankFailure, match="uses a control flow statement"):
        ranks(1).run(today.gradient_accumulation)


def test_repeated_row_accumulates_squares_of_its_parts(ranks):
    assert ranks(1).run(today.row_used_twice, True) == [pytest.approx([-0.2, -0.2], abs=1e-4)]
    assert ranks(1).run(today.row_used_twice, False) == [pytest.approx([-0.253, -0.089], abs=1e-3)]
