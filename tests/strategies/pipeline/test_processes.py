"""Pipelines on several processes have plain Keras's numbers, and the same bits on all ranks."""

import numpy as np
import pytest

from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.pipeline import cases
from tfdml.timeline.job_timeline import JobTimeline
from tfdml.timeline.rank_timeline import Kind

FLOAT64 = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("horovod", "residual"),
        pytest.param("horovod", "transformer", marks=pytest.mark.slow),
        pytest.param("horovod", "two_of_each", marks=pytest.mark.slow),
        pytest.param("multi_worker", "shared", marks=pytest.mark.slow),
        pytest.param("multi_worker", "masked", marks=pytest.mark.slow),
    ],
)
def test_two_processes_of_two_stages(ranks, kind, model):
    (plain,) = ranks.run_sizes((1,), cases.plain, model)[1]
    both = ranks(2, kind).run(cases.in_stages, model)
    assert_same_bits(both)
    for staged in both:
        assert_close(plain, staged, **FLOAT64)


@pytest.mark.slow
def test_two_processes_of_two_groups(ranks):
    (plain,) = ranks.run_sizes((1,), cases.plain, "residual")[1]
    both = ranks(2).run(cases.in_stages, "residual", cases.TWO_GROUPS)
    assert_same_bits(both)
    for staged in both:
        assert_close(plain, staged, **FLOAT64)


@pytest.mark.slow
def test_divided_slots_are_on_their_stages(ranks):
    (plain,) = ranks.run_sizes((1,), cases.plain, "residual")[1]
    for divided, places in ranks(2).run(cases.with_divided_slots):
        assert_close(plain["weights"], divided, **FLOAT64)
        assert len({place for _, place in places}) == 2
        assert all(place == of_weight for of_weight, place in places)


@pytest.mark.slow
def test_callbacks_that_observe_steps(ranks, tmp_path):
    """They change no number, and see the exchange of the stages' gradients."""
    plain = ranks(2).run(cases.monitored, None)
    watched = ranks(2).run(cases.monitored, str(tmp_path))
    assert_same_bits([*plain, *watched])
    for logs in (result["history"] for result in watched):
        assert len(logs["perf/step_ms"]) == 2
        assert np.all(np.array(logs["perf/bytes_sent"]) > 0)
        assert np.all(np.array(logs["perf/grad_norm"]) > 0)
        assert "gradient_noise_scale" in logs
    for timeline in JobTimeline.load(tmp_path).ranks:
        kinds = {span.kind for span in timeline.spans if span.step == 2}
        assert {Kind.COMPUTE, Kind.EXCHANGE, Kind.UPDATE} <= kinds
