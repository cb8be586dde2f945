"""Checks the recipe of training at several sites."""

import re

import pytest

from tests.recipes import cases

OPTIONS = {"data": "digits", "epochs": 6, "batch_size": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more", "least"),
    [
        ("local_sgd", {}, 0.8),
        ("local_sgd", {"sync_every": "auto", "compression": "int4"}, 0.8),
        # It is made for longer trainings; guessing gives 0.1.
        ("diloco", {"sync_every": "20"}, 0.3),
        ("synchronous", {}, 0.8),
    ],
)
def test_two_sites(ranks, method, more, least):
    output = ranks(2).run(cases.run, "local_updates", {"method": method, **OPTIONS, **more})[0]
    found = re.search(rf"{method}: validation accuracy (\S+) after 6 epochs", output)
    assert found, output
    assert float(found[1]) > least
