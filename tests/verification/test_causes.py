"""Causes of the first difference, recognised in records made by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from tfdml.verification import record
from tfdml.verification.aligning import RecordedRun
from tfdml.verification.causes import cause_of
from tfdml.verification.comparing import compare
from tfdml.verification.evidence import Cause
from tfdml.verification.record import Entry, Record

ROWS = [7, 3, 5, 9]
HALVES = [ROWS[:2], ROWS[2:]]


def run(rows: Sequence, tensors: Sequence = (), **facts) -> RecordedRun:
    """Returns a run of a step, or of what comes before the first one.

    Args:
        rows: Digests of the rows of each replica.
        tensors: Kind, name and numbers of each tensor; of an output a number for each row, else one
            number that all replicas have, or one for each replica.
        **facts: Facts of the run.
    """
    entries, ends = [], np.cumsum([len(part) for part in rows])
    for replica, part in enumerate(rows):
        digests = np.array(part, np.uint64)
        entries.append(Entry(0, record.ROWS, "batch", replica, record.BY_ROWS, 1, digests))
        for kind, name, values in tensors:
            if kind in (record.WEIGHT, record.METRIC) and replica:
                continue  # A rank notes them once.
            layout, step, size = record.AS_SAME, 0, 1
            if kind == record.OUTPUT:
                layout = record.BY_ROWS
                numbers = np.array(values)[ends[replica] - len(part) : ends[replica], np.newaxis]
            else:
                numbers = np.resize(np.array(values, float), len(rows))[replica : replica + 1]
            if kind == record.LOSS:
                layout = record.AS_MEAN
            if kind == record.GRADIENT:
                layout, numbers = record.AS_SUM, numbers / len(rows)
            if name == "initial":
                step = -1
            entries.append(Entry(step, kind, name, replica, layout, size, numbers))
    known = {"precision": "float32", "layers": {}, "replicas": len(rows), "repeated_rows": []}
    entries.sort(key=lambda entry: entry.step)
    return RecordedRun([Record(entries, known | facts)])


def cause(one: Sequence, several: Sequence, **facts) -> Cause | None:
    """Returns the cause of the difference between a step on one replica and on two."""
    reference = run([ROWS], one, **facts)
    return cause_of(compare(reference, reference, run(HALVES, several, **facts)))


def test_no_difference_has_no_cause():
    assert cause([OUTPUT], [OUTPUT]) is None


UNSEEDED = {"data": {"drawn": "`Dataset.shuffle` without a seed", "adapter": "TFDatasetAdapter"}}
DRAWN = {"data": {"drawn": "RandomUniform without a seed in the function of a Map stage"}}
OTHER = [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("name", "again", "several", "facts"),
    [
        ("shuffle", OTHER, [OTHER[:2], OTHER[2:]], UNSEEDED),
        ("augmentation", OTHER, [OTHER[:2], OTHER[2:]], DRAWN),
        ("unseeded data", OTHER, [OTHER[:2], OTHER[2:]], {}),
        ("batch multiplied by size", ROWS, [ROWS, OTHER], {}),
        ("same rows on several ranks", ROWS, [ROWS[:2], ROWS[:2]], {}),
        ("uneven data", ROWS, [ROWS[:3], [1]], {}),
        ("data by rank", ROWS, [ROWS[:2], OTHER[:2]], {}),
    ],
)
def test_the_cause_of_other_rows_is_named(name, again, several, facts):
    runs = (run(rows, **facts) for rows in ([ROWS], [again], several))
    assert cause_of(compare(*runs)).name == name


OUTPUT = (record.OUTPUT, "layer", [1.0, 2.0, 3.0, 4.0])
OTHER_OUTPUT = (record.OUTPUT, "layer", [1.5, 2.5, 2.5, 3.5])
ALONE = {"class": "BatchNormalization", "normalizes": record.OWN_ROWS}
DROPS = {"class": "OwnDropout", "draws": "RandomUniform"}


@pytest.mark.parametrize(
    ("name", "one", "several", "layer"),
    [
        ("BatchNormalization", OUTPUT, OTHER_OUTPUT, ALONE),
        ("Dropout", OUTPUT, OTHER_OUTPUT, DROPS),
        ("random layer", OUTPUT, OTHER_OUTPUT, DROPS | {"class": "Noise"}),
        ("branch on rank", OUTPUT, (record.OUTPUT, "layer", [1.0, 2.0, 3.5, 4.5]), {}),
        ("batch-size layer", OUTPUT, OTHER_OUTPUT, {}),
        ("summed loss", (record.LOSS, "mse", 6.0), (record.LOSS, "mse", [4.0, 2.0]), {}),
        ("loss of the batch", (record.LOSS, "mse", 6.0), (record.LOSS, "mse", 7.0), {}),
        ("gradient of a replica", (record.GRADIENT, "w", 1.0), (record.GRADIENT, "w", 2.0), {}),
        ("exchange", (record.SUM, "w", 1.0), (record.SUM, "w", 2.0), {}),
        ("rate multiplied by size", (record.RATE, "adam", 0.1), (record.RATE, "adam", 0.2), {}),
        ("rate by size", (record.RATE, "adam", 0.1), (record.RATE, "adam", 0.3), {}),
        ("other model", (record.WEIGHT, "initial", 1.0), (record.WEIGHT, "initial", 2.0), {}),
        ("update", (record.WEIGHT, "w", 1.0), (record.WEIGHT, "w", 2.0), {}),
        ("metric", (record.METRIC, "auc", 1.0), (record.METRIC, "auc", 2.0), {}),
    ],
)
def test_the_cause_within_a_step_is_named(name, one, several, layer):
    assert cause([one], [several], layers={"layer": layer}).name == name


def test_a_batch_normalization_that_is_synchronized_is_not_told_to_be_so():
    whole = {"class": "Masked", "normalizes": record.WHOLE_BATCH}
    found = cause([OUTPUT], [OTHER_OUTPUT], layers={"layer": whole})
    assert found.name == "BatchNormalization"
    assert "though it has `synchronized=True`" in found.words
    assert "Make the layer" not in found.fix
    found = cause([OUTPUT], [OTHER_OUTPUT], layers={"layer": ALONE})
    assert "Make the layer with `synchronized=True`" in found.fix


def weights(kind: str, table: float, kernel: float) -> list:
    """Returns a table's and a kernel's tensor."""
    return [(kind, "table", table), (kind, "kernel", kernel)]


@pytest.mark.parametrize("kind", [record.GRADIENT, record.WEIGHT])
def test_tables_that_alone_differ_and_repeat_rows_are_named(kind):
    found = cause(weights(kind, 1.0, 1.0), weights(kind, 2.0, 1.0), repeated_rows=["table"])
    assert found.name == "repeated embedding rows"
    assert "`table`" in found.words


@pytest.mark.parametrize(
    ("kind", "name"),
    [(record.GRADIENT, "gradient of a replica"), (record.WEIGHT, "update")],
)
def test_repeated_rows_are_not_blamed_for_other_differences(kind, name):
    one, tables_differ = weights(kind, 1.0, 1.0), weights(kind, 2.0, 1.0)
    assert cause(one, weights(kind, 2.0, 2.0), repeated_rows=["table"]).name == name
    assert cause(one, tables_differ).name == name
    assert cause(one[:1], tables_differ[:1], repeated_rows=["table"]).name == name


def test_repeated_rows_are_not_blamed_for_an_exchange():
    one, several = weights(record.SUM, 1.0, 1.0), weights(record.SUM, 2.0, 1.0)
    assert cause(one, several, repeated_rows=["table"]).name == "exchange"
