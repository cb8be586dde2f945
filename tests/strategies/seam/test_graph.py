"""Checks the exchanges of a train step, and that its graph does not grow unnoticed."""

import pytest

from tests.strategies.seam import graph_cases as cases

PLAIN = {"all_reduce 4": 2, "all_reduce 16012": 1, "all_reduce 80": 1}
QSGD = {
    "all_reduce 4": 2,
    "all_reduce 1612": 1,
    "all_to_all 4128": 1,
    "all_gather 2064": 1,
    "all_reduce 80": 1,
}
POWER_SGD = {
    "all_reduce 4": 2,
    "all_reduce 1612": 1,
    "all_reduce 3248": 1,
    "all_reduce 3224": 1,
    "all_reduce 80": 1,
}
AUTO = {
    **PLAIN,
    **{"all_reduce 1612": 3, "all_to_all 16400": 1, "all_gather 8200": 1, "all_to_all 4128": 1},
    **{"all_gather 2064": 1, "all_to_all 2080": 1, "all_gather 1040": 1, "all_reduce 6412": 1},
    **{"all_reduce 96": 1, "all_reduce 6400": 1, "all_reduce 8": 1},
}


# Counted with TensorFlow 2.21 and Keras 3.15, and with the branch that runs only where batches
# differ. Raise a number only for a good reason.
@pytest.mark.parametrize(
    ("arguments", "operations", "exchanges"),
    [
        (("QSGD", 2), 564, QSGD),
        pytest.param(("none",), 333, PLAIN, marks=pytest.mark.slow),
        pytest.param(("none", 2), 505, PLAIN, marks=pytest.mark.slow),
        pytest.param(("none", None, True), 387, PLAIN, marks=pytest.mark.slow),
        pytest.param(("QSGD",), 392, QSGD, marks=pytest.mark.slow),
        pytest.param(("PowerSGD",), 581, POWER_SGD, marks=pytest.mark.slow),
        pytest.param(("auto",), 798, AUTO, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_graph_of_a_train_step(ranks, arguments, operations, exchanges):
    for found in ranks(2).run(cases.traced, *arguments):
        assert found["exchanges"] == exchanges
        assert found["operations"] <= operations, found["operations"]
