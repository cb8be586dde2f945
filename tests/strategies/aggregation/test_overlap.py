"""Checks, by blocking the backward pass, that the exchange starts while it still runs."""

import pytest

from tests.strategies.aggregation import overlap_cases as cases


@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_bucket_is_exchanged_before_the_last_is_computed(ranks, kind, devices):
    case = (cases.exchanged_while_the_first_layer_waits, 40.0, False, devices)
    for came in ranks(2, kind).run(*case):
        assert came == [True, True]


@pytest.mark.parametrize("kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)])
def test_a_timeline_does_not_delay_it_and_tells_when_it_was(ranks, kind):
    """TensorFlow runs operations that read the time in the order in which they are traced."""
    order = ["first begins", "first ends", "has arrived"]
    for steps in ranks(2, kind).run(cases.recorded_while_the_first_layer_waits, 40.0):
        assert len(steps) == 2
        for times in steps:
            for after in ("second begins", "computed"):
                values = [times[name] for name in (*order, after)]
                # TensorFlow's times are cut to whole microseconds.
                assert all(b - a > -2e-6 for a, b in zip(values, values[1:], strict=False)), times


def test_exchange_after_all_gradients_is_detected(ranks):
    """However long the backward pass is blocked, the sums cannot arrive meanwhile."""
    for came in ranks(2).run(cases.exchanged_while_the_first_layer_waits, 0.5, True):
        assert came == [False, False]


@pytest.mark.parametrize(("size", "kind"), [(1, "horovod"), (2, "horovod"), (2, "mirrored")])
def test_update_does_not_start_before_the_backward_pass(ranks, size, kind):
    """An early update would occupy the CPU that the exchange waits for."""
    for came in ranks(size, kind).run(cases.updating_while_the_backward_pass_waits, 0.5):
        assert came
        assert not any(came)


@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
@pytest.mark.parametrize(
    ("compression", "name"), [(None, "bucket_{}"), ("int8", "compressed_{}/to_owner")]
)
def test_buckets_have_the_requested_size(ranks, kind, compression, name):
    # A kernel has 4,096 bytes: one, two or all four per bucket.
    for options, count in (({"bucket_bytes": 4096}, 4), ({"bucket_bytes": 8192}, 2), ({}, 1)):
        wanted = [name.format(i) for i in range(count)]
        options["compression"] = compression
        assert ranks(2, kind).run(cases.exchanges_of_a_step, options) == [wanted, wanted]
