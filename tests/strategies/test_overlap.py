"""The exchange starts while the backward pass runs: shown by holding the backward pass."""

import pytest

from tests.strategies import overlap_cases as cases


@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_the_first_bucket_is_exchanged_before_the_last_is_computed(ranks, kind):
    for came in ranks(2, kind).run(cases.exchanged_while_the_first_layer_waits, 40.0):
        assert came == [True, True]


def test_an_exchange_that_waits_for_all_gradients_goes_red(ranks):
    """However long the backward pass is held, the sums cannot come meanwhile."""
    for came in ranks(2).run(cases.exchanged_while_the_first_layer_waits, 0.5, True):
        assert came == [False, False]
