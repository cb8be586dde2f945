"""Checks the recipes with a custom `train_step` and a custom loop."""

import re

import pytest

from tests.recipes import cases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "printed", "low", "high"),
    [
        ("own_train_step", r"mean error of a pixel: (\S+)", 0.1, 0.18),
        ("own_loop", r"test accuracy: (\S+)", 0.93, 1.0),
    ],
)
def test_one_process_and_two(ranks, recipe, printed, low, high):
    for size in (1, 2):
        chief, *others = ranks(size).run(cases.run, recipe, {})
        assert low < float(re.search(printed, chief)[1]) < high
        assert not any(re.search(printed, other) for other in others)
