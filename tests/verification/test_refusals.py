"""Causes that tfdml names itself, by the last lines of a process that has failed."""

import pytest

from tfdml.verification.refusals import cause_of_failure

SHARD = "ValueError: `Dataset.shard` must not divide the data of a strategy. Received on rank 1: 2."
ASSERTION = (
    "tensorflow.python.framework.errors_impl.InvalidArgumentError: {{function_node __wrapped__}} "
    "assertion failed: [Batches must be the same on all 2 ranks. Received a different batch on "
    "ranks:] [1] [Seed what draws random numbers.]"
)
GUARD = ["", "tfdml: the job ends on all 2 ranks, because rank 1 raised an exception."]


@pytest.mark.parametrize(
    ("line", "name", "fix"),
    [
        (SHARD, "Dataset.shard", SHARD),
        (
            ASSERTION,
            "data by rank",
            "Batches must be the same on all 2 ranks. Received a different batch on ranks: 1 Seed "
            "what draws random numbers.",
        ),
        ("KeyError: 'here'", "failure", "KeyError: 'here'"),
    ],
)
def test_an_error_is_named_by_its_message(line, name, fix):
    found = cause_of_failure(["Traceback (most recent call last):", line, *GUARD])
    assert (found.name, found.fix) == (name, fix)


def test_a_failure_without_an_error_has_its_last_lines():
    assert cause_of_failure(["killed"]).fix == "killed"
