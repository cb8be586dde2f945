"""A model in stages has plain Keras's numbers: losses, metrics, weights, slots, predictions."""

import pytest

from tests.strategies.compare import assert_close
from tests.strategies.pipeline import cases

FLOAT64 = {"rtol": 1e-10, "atol": 1e-10}


def _assert_equal(ranks, model, groups, compile_options=None, **options) -> None:
    ((plain, staged),) = ranks(4, "mirrored").run(
        cases.both, model, groups, compile_options or {}, options
    )
    assert_close(plain, staged, **FLOAT64)


@pytest.mark.parametrize("model", cases.MODELS)
def test_two_groups_of_two_stages(ranks, model):
    _assert_equal(ranks, model, cases.TWO_GROUPS)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_four_stages(ranks, schedule):
    _assert_equal(ranks, "residual", cases.FOUR_STAGES, num_microbatches=6, schedule=schedule)


@pytest.mark.parametrize("optimizer", [cases.clipped, cases.averaged])
def test_optimizers(ranks, optimizer):
    _assert_equal(ranks, "residual", cases.TWO_GROUPS, {"optimizer": optimizer})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"optimizer": cases.accumulating}, {"steps_per_execution": 2}],
    ids=["sums", "steps"],
)
def test_steps_that_belong_together(ranks, options):
    _assert_equal(ranks, "residual", cases.TWO_GROUPS, options)


@pytest.mark.parametrize("model", ["residual", "transformer"])
@pytest.mark.parametrize("way", ["jit_compile", "run_eagerly"])
def test_ways_to_run(ranks, model, way):
    _assert_equal(ranks, model, cases.ONE_GROUP, {way: True})
