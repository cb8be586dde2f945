"""Comparison of records: which distances are rounding, and rows in another order."""

import numpy as np
import pytest

from tfdml.verification import record
from tfdml.verification.aligning import RecordedRun, order_of_rows
from tfdml.verification.comparing import compare
from tfdml.verification.digests import project, project_rows, row_digests
from tfdml.verification.record import Entry, Record, load

ROWS = np.array([7, 3, 5, 9], np.uint64)
OUTPUTS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])


def run(rows, outputs, losses=(2.0,), rate=0.1, **facts) -> RecordedRun:
    """Returns a run of a step whose replicas have the given rows and outputs."""
    entries = []
    for replica, (own, output) in enumerate(zip(rows, outputs, strict=True)):
        loss = np.array([losses[replica % len(losses)]])
        entries += [
            Entry(0, record.ROWS, "batch", replica, record.BY_ROWS, 1, own),
            Entry(0, record.OUTPUT, "dense", replica, record.BY_ROWS, 2, output),
            Entry(0, record.LOSS, "total", replica, record.AS_MEAN, 1, loss),
            Entry(0, record.RATE, "adam", replica, record.AS_SAME, 1, np.array([rate])),
        ]
    known = {"precision": "float32", "layers": {}, "replicas": len(rows), **facts}
    return RecordedRun([Record(entries, known)])


ONE = run([ROWS], [OUTPUTS])
AGAIN = run([ROWS], [OUTPUTS * (1 + 1e-7)])


def halves(outputs, **options) -> RecordedRun:
    """Returns a run on two replicas, the first with the rows 0 and 2."""
    return run([ROWS[[0, 2]], ROWS[[1, 3]]], [outputs[[0, 2]], outputs[[1, 3]]], **options)


def test_rows_in_another_order_are_the_same():
    assert order_of_rows(ROWS[[2, 0, 3, 1]], ROWS).tolist() == [1, 3, 0, 2]
    assert order_of_rows(ROWS[:3], ROWS) is None
    assert compare(ONE, AGAIN, halves(OUTPUTS)).first is None


def test_a_distance_within_rounding_is_no_difference():
    assert compare(ONE, AGAIN, halves(OUTPUTS * (1 + 1e-6))).first is None
    coarse = run([ROWS], [OUTPUTS * (1 + 1e-4)])
    assert compare(ONE, coarse, halves(OUTPUTS * (1 + 5e-4))).first is None
    assert compare(ONE, coarse, halves(OUTPUTS * (1 + 5e-3))).first is not None


def test_the_first_difference_names_its_replica():
    moved = OUTPUTS.copy()
    moved[3, 1] += 0.01
    first = compare(ONE, AGAIN, halves(moved, rate=0.2)).first
    assert first.key == (0, record.OUTPUT, "dense")
    assert first.replicas == (1,)
    assert first.distance == pytest.approx(0.01 / 8)


def test_a_loss_is_the_mean_of_the_replicas_by_their_rows():
    rows = [ROWS[:3], ROWS[3:]]
    parts = [OUTPUTS[:3], OUTPUTS[3:]]
    assert compare(ONE, AGAIN, run(rows, parts, losses=(1.0, 5.0))).first is None
    first = compare(ONE, AGAIN, run(rows, parts, losses=(1.0, 4.0))).first
    assert first.key == (0, record.LOSS, "total")


def test_other_rows_end_the_comparison():
    other = np.array([1, 2], np.uint64)
    found = compare(ONE, AGAIN, run([ROWS[:2], other], [OUTPUTS[:2], OUTPUTS[2:]]))
    assert found.first.key == (0, record.ROWS, "batch")
    assert found.first.replicas == (1,)
    assert len(found.tensors) == 1


def test_a_tensor_that_one_replica_lacks_differs():
    lacking = halves(OUTPUTS)
    entries = [e for e in lacking.records[0].entries if e.kind != record.OUTPUT or not e.replica]
    found = compare(ONE, AGAIN, RecordedRun([Record(entries, lacking.facts)]))
    assert found.first.key == (0, record.OUTPUT, "dense")
    assert found.first.distance == np.inf


def test_a_tensor_that_one_process_does_not_have_differs():
    more = halves(OUTPUTS)
    extra = [
        Entry(0, record.OUTPUT, "more", replica, record.BY_ROWS, 2, OUTPUTS[:2])
        for replica in (0, 1)
    ]
    found = compare(
        ONE, AGAIN, RecordedRun([Record([*more.records[0].entries, *extra], more.facts)])
    )
    assert found.first.key == (0, record.OUTPUT, "more")


def test_gradients_that_are_all_rounding_are_compared_with_the_largest():
    def with_gradients(small):
        entries = [
            Entry(0, record.GRADIENT, name, 0, record.AS_SUM, 1, np.array([value]))
            for name, value in (("kernel", 1.0), ("bias", small))
        ]
        rows = Entry(0, record.ROWS, "batch", 0, record.BY_ROWS, 1, ROWS)
        return RecordedRun([Record([rows, *entries], ONE.facts)])

    zero = with_gradients(0.0)
    assert compare(zero, zero, with_gradients(1e-9)).first is None
    assert compare(zero, zero, with_gradients(1e-3)).first.key[2] == "bias"


def test_numbers_that_are_not_finite_are_compared():
    broken = OUTPUTS.copy()
    broken[1, 0] = np.nan
    assert compare(ONE, AGAIN, halves(broken)).first.distance == np.inf
    both = run([ROWS], [broken])
    assert compare(both, both, halves(broken)).first is None


def test_a_projection_keeps_small_tensors_and_moves_with_any_number_of_large_ones():
    small = np.arange(12.0).reshape(3, 4)
    assert (project_rows(small) == small).all()
    assert (project(small) == small.ravel()).all()
    large = np.random.default_rng(0).normal(size=(2, 1000))
    assert project_rows(large).shape == (2, 64)
    for place in (0, 63, 999):
        moved = large.copy()
        moved[1, place] += 1e-3
        difference = project_rows(moved) - project_rows(large)
        assert np.abs(difference).sum() == pytest.approx(1e-3)
        assert not difference[0].any()


def test_digests_are_those_of_rows():
    x, words = np.arange(8.0).reshape(4, 2), [b"a", b"b", b"a", b"c"]
    digests = row_digests([x, words], 4)
    assert len(set(digests.tolist())) == 4
    assert (row_digests([x[2:], words[2:]], 2) == digests[2:]).all()
    x[0] = x[2]
    digests = row_digests([x, words], 4)
    assert digests[0] == digests[2]


def test_a_record_is_read_as_it_was_written(tmp_path):
    ONE.records[0].save(tmp_path, 0)
    halves(OUTPUTS).records[0].save(tmp_path, 10)
    halves(OUTPUTS, rate=0.5).records[0].save(tmp_path, 2)
    first, second, third = load(tmp_path)
    assert first.facts == ONE.facts
    assert (first.entries[1].values == OUTPUTS).all()
    assert second.entries[-1].values.item() == 0.5
    assert third.entries[-1].values.item() == 0.1
