"""Pipelines on several processes have plain Keras's numbers, and the same bits on all ranks."""

import pytest

from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.pipeline import cases

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
