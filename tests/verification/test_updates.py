"""Updates of a codec beside uncompressed ones, from records made by hand."""

import io

import numpy as np
import pytest
from rich.console import Console

from tfdml.verification import record
from tfdml.verification.aligning import RecordedRun
from tfdml.verification.record import Entry, Record
from tfdml.verification.updates import compare_updates, show_updates

INITIAL = {"kernel": [1.0, 1.0], "frozen": [3.0]}


def run(*steps: dict) -> RecordedRun:
    """Returns a run with the weights after each step."""
    entries = [
        Entry(step, record.WEIGHT, name, 0, record.AS_SAME, len(values), np.array(values))
        for step, weights in enumerate([INITIAL, *steps], -1)
        for name, values in (INITIAL | weights).items()
    ]
    facts = {"steps": len(steps), "replicas": 2, "strategy": "HorovodStrategy"}
    return RecordedRun([Record(entries, facts)])


UNCOMPRESSED = run({"kernel": [2.0, 1.0]}, {"kernel": [2.0, 2.0]})


def test_updates_are_compared_from_the_initial_weights_on():
    compressed = run({"kernel": [1.5, 1.0]}, {"kernel": [2.0, 1.0]})
    (kernel,) = compare_updates(compressed, UNCOMPRESSED)
    assert kernel.name == "kernel"  # What is not trained is left out.
    assert kernel.first == pytest.approx(0.5)  # Half of [1, 0].
    assert kernel.all == pytest.approx(np.sqrt(0.5))  # [1, 0] instead of [1, 1].
    assert kernel.cosine == pytest.approx(np.sqrt(0.5))


def test_an_update_of_zero_is_infinitely_far_off_if_another_is_not():
    later = run({}, {"kernel": [2.0, 2.0]})
    assert compare_updates(UNCOMPRESSED, later)[0].first == np.inf
    assert compare_updates(later, UNCOMPRESSED)[0].first == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("after", "shown"), [(2.0, "0.0%"), (2.00003, "0.003%"), (2.004, "0.4%"), (3.5, "150.0%")]
)
def test_small_distances_keep_a_digit(after, shown):
    console = Console(file=io.StringIO(), width=200)
    one = run({"kernel": [2.0, 1.0]})
    other = run({"kernel": [after, 1.0]})
    show_updates(compare_updates(other, one), other, console)
    lines = console.file.getvalue().splitlines()
    assert lines[1].split() == ["kernel", shown, shown, "1.000"]
    assert f"farthest off, by {shown}" in lines[-1]
