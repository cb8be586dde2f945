"""Checks the recipe in which one rank has wrong data."""

import re

import pytest

from tests.recipes import cases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "least", "most"), [("mean", 0.0, 0.75), ("trimmed", 0.8, 1.0), ("clipping", 0.8, 1.0)]
)
def test_a_rule_trains_and_names_the_wrong_rank(ranks, rule, least, most):
    options = {"rule": rule, "data": "digits", "epochs": 8, "batch_size": 32}
    output = ranks(4).run(cases.run, "robust", options)[0]
    found = re.search(rf"{rule}: validation accuracy (\S+) after 8 epochs", output)
    assert found, output
    assert least <= float(found[1]) <= most
    named = set(re.findall(r"Rank (\d) \(\S+\) is an outlier", output))
    assert named == (set() if rule == "mean" else {"3"})
