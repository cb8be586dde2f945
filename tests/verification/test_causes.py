"""Causes of the first difference, recognised in records made by hand."""

import numpy as np

from tfdml.verification import record
from tfdml.verification.aligning import RecordedRun
from tfdml.verification.causes import cause_of
from tfdml.verification.comparing import compare
from tfdml.verification.evidence import Cause
from tfdml.verification.record import Entry, Record

ROWS = np.array([7, 3, 5, 9], np.uint64)


def run(replicas: int, numbers: dict, **facts) -> RecordedRun:
    """Returns a run of a step on rows in equal parts.

    Args:
        replicas: Number of replicas.
        numbers: Of each tensor (kind, name), a number for each row of an output; else one number.
        **facts: Facts of the run.
    """
    entries = []
    for replica in range(replicas):
        own = slice(replica * len(ROWS) // replicas, (replica + 1) * len(ROWS) // replicas)
        entries.append(Entry(0, record.ROWS, "batch", replica, record.BY_ROWS, 1, ROWS[own]))
        for (kind, name), values in numbers.items():
            if kind == record.WEIGHT and replica:
                continue  # A rank notes its weights once.
            if kind == record.OUTPUT:
                part, layout = np.array(values)[own, np.newaxis], record.BY_ROWS
            elif kind == record.GRADIENT:
                part, layout = np.array([values / replicas]), record.AS_SUM
            else:
                part, layout = np.array([values]), record.AS_SAME
            entries.append(Entry(0, kind, name, replica, layout, 1, part))
    known = {"precision": "float32", "layers": {}, "replicas": replicas, "repeated_rows": []}
    return RecordedRun([Record(entries, known | facts)])


def cause(one: dict, several: dict, **facts) -> Cause:
    """Returns the cause of the difference between a run on one replica and one on two."""
    reference = run(1, one, **facts)
    return cause_of(compare(reference, reference, run(2, several, **facts)))


OUTPUT = {(record.OUTPUT, "norm"): [1.0, 2.0, 3.0, 4.0]}
OTHER_OUTPUT = {(record.OUTPUT, "norm"): [1.5, 2.5, 2.5, 3.5]}


def test_a_batch_normalization_of_own_rows_is_named():
    facts = {"norm": {"class": "BatchNormalization", "normalizes": record.OWN_ROWS}}
    found = cause(OUTPUT, OTHER_OUTPUT, layers=facts)
    assert found.name == "BatchNormalization"
    assert "Make the layer with `synchronized=True`" in found.fix


def test_a_batch_normalization_that_is_synchronized_is_not_told_to_be_so():
    facts = {"norm": {"class": "Masked", "normalizes": record.WHOLE_BATCH}}
    found = cause(OUTPUT, OTHER_OUTPUT, layers=facts)
    assert found.name == "BatchNormalization"
    assert "though it has `synchronized=True`" in found.words
    assert "Make the layer" not in found.fix


def weights(kind: str, table: float, kernel: float) -> dict:
    """Returns numbers of a table and of a kernel."""
    return {(kind, "table"): table, (kind, "kernel"): kernel}


def test_tables_that_alone_differ_and_repeat_rows_are_named():
    for kind in (record.GRADIENT, record.WEIGHT):
        one, several = weights(kind, 1.0, 1.0), weights(kind, 2.0, 1.0)
        found = cause(one, several, repeated_rows=["table"])
        assert found.name == "repeated embedding rows"
        assert "`table`" in found.words


def test_repeated_rows_are_not_blamed_for_others_differences():
    for kind, name in ((record.GRADIENT, "gradient of a replica"), (record.WEIGHT, "update")):
        one, all_differ = weights(kind, 1.0, 1.0), weights(kind, 2.0, 2.0)
        assert cause(one, all_differ, repeated_rows=["table"]).name == name
        assert cause(one, weights(kind, 2.0, 1.0)).name == name
        alone = {(kind, "table"): 1.0}, {(kind, "table"): 2.0}
        assert cause(*alone, repeated_rows=["table"]).name == name
    one, several = weights(record.SUM, 1.0, 1.0), weights(record.SUM, 2.0, 1.0)
    assert cause(one, several, repeated_rows=["table"]).name == "exchange"
