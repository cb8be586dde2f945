"""Checks that an overflow on any replica skips the step on all, for all strategies and codecs."""

import numpy as np
import pytest

from tests.mixed_precision import cases


def _check(results: list[dict]) -> None:
    for result in results:
        assert all(result["unchanged"])
        assert result["scale"] == 2.0**9
        assert result["iterations"] == 3
        assert result["wrapped_once"]
        for own, first in zip(result["weights"], results[0]["weights"], strict=True):
            assert np.isfinite(own).all()
            assert own.tobytes() == first.tobytes()


# 12 rows, each on a different replica.
@pytest.mark.parametrize("row", [pytest.param(0, marks=pytest.mark.slow), 11])
@pytest.mark.parametrize(
    ("kind", "size", "devices"),
    [("horovod", 2, 1), ("horovod", 2, 2), ("mirrored", 2, 1), ("multi_worker", 2, 1)],
)
def test_an_overflow_skips_the_step_on_all(ranks, kind, size, devices, row):
    _check(ranks(size, kind).run(cases.overflowing, row, None, True, devices))


@pytest.mark.parametrize("compressor", ["fp16", "int8", "powersgd", "topk", "onebit"])
def test_an_overflow_is_seen_through_every_family_of_codecs(ranks, compressor):
    _check(ranks(2).run(cases.overflowing, 11, compressor, False))


def test_too_many_skipped_steps_are_an_error_on_all(ranks):
    for result in ranks(2).run(cases.overflowing, 11, None, False, 1, 3):
        assert "At most 3 steps in a row may overflow" in result["error"]
        assert "the model diverged, not the scale" in result["error"]
        assert result["last_scale"] == 2.0**8


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    [None, "powersgd", "int8", "onebit"],
)
def test_with_rare_overflows_it_converges_as_float32_does(ranks, compressor):
    wide = ranks(2).run(cases.converged, "float32", compressor)[0]
    narrow = ranks(2).run(cases.converged, "mixed_float16", compressor)[0]
    assert 5 <= narrow["skipped"] <= 40  # Out of 200 steps.
    assert wide["skipped"] == 0
    assert wide["loss"] < 0.15 * wide["first"]
    assert narrow["loss"] < wide["loss"] + 0.03 * wide["first"]
    assert narrow["accuracy"] > wide["accuracy"] - 0.02
