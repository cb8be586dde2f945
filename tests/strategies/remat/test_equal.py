"""Checks that blocks give the numbers of the same model without them."""

import pytest

from tests.strategies.compare import assert_close
from tests.strategies.remat.cases import (
    BLOCKS,
    SCOPES,
    reference,
    trained,
)

WAYS = [("dense", how) for how in [*BLOCKS, *SCOPES] if how not in ("none", "no function")]
WAYS += [("sequence", how) for how in ["block", *SCOPES]] + [("losses", "block")]
# XLA rounds a block that is computed again otherwise.
WITH_XLA = 1e-12
_references: dict = {}


def _difference(how: str, model: str, tolerance: float, **options) -> None:
    key = (reference(how), model, *sorted(options.items()))
    if key not in _references:
        _references[key] = trained(reference(how), model, **options)
    assert_close(_references[key], trained(how, model, **options), rtol=0, atol=tolerance)


def _ways(*by_default: tuple[str, str]) -> list:
    return [w if w in by_default else pytest.param(*w, marks=pytest.mark.slow) for w in WAYS]


@pytest.mark.parametrize(("model", "how"), _ways(("dense", "block"), ("dense", "full")))
def test_in_a_graph(model, how):
    _difference(how, model, 0.0)


@pytest.mark.parametrize(("model", "how"), _ways(("losses", "block")))
def test_eagerly(model, how):
    _difference(how, model, 0.0, run_eagerly=True)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "how"), WAYS)
def test_with_xla(model, how):
    _difference(how, model, WITH_XLA, jit_compile=True)
