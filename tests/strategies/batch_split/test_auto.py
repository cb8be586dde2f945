"""Checks parts by measured times on real ranks, and that they outlive a restart."""

import pytest

from tests.strategies.batch_split import cases
from tests.strategies.compare import assert_same_bits


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("records"))
    cases.write_records(directory)
    return directory


@pytest.mark.parametrize("source", ["arrays", pytest.param("dataset", marks=pytest.mark.slow)])
def test_a_slower_rank_gets_fewer_rows(ranks, source):
    fast, slow = ranks(2).run(cases.paced, [0.001, 0.02], 4, source)
    assert fast["rows"][0] == slow["rows"][0] == [24] * 5, "The first epoch has equal parts."
    for one, other in zip(fast["rows"], slow["rows"], strict=True):
        assert len(set(one)) == len(set(other)) == 1, "Parts change between epochs only."
        assert one[0] + other[0] == 48
    assert 1 <= slow["rows"][-1][0] < 16 < fast["rows"][-1][0]
    assert fast["weights"] == slow["weights"]
    # `StepMonitor` shows the parts of each epoch.
    assert fast["shares"] == slow["shares"]
    shown = [round(48 * shares[1]) for shares in fast["shares"]]
    assert shown == pytest.approx([rows[0] for rows in slow["rows"]], abs=1)


@pytest.mark.parametrize(
    ("batch_split", "source", "ends_at"),
    [
        pytest.param("auto", "arrays", 11, marks=pytest.mark.slow),
        pytest.param("auto", "arrays", 2, marks=pytest.mark.slow),
        pytest.param("auto", "dataset", 11, marks=pytest.mark.slow),
        pytest.param("auto", "records", 11, marks=pytest.mark.slow),
        pytest.param([3, 1], "arrays", 11, marks=pytest.mark.slow),
        pytest.param([3, 1], "records", 11, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_training_has_the_same_bits(
    ranks, tmp_path, records, batch_split, source, ends_at
):
    whole = ranks(2).run(cases.lives, batch_split, source, str(tmp_path / "whole"), records, 0)
    again = ranks(2).run(
        cases.lives, batch_split, source, str(tmp_path / "again"), records, ends_at
    )
    assert_same_bits([{"weights": weights} for weights, _ in [*whole, *again]])
    if batch_split == "auto" and ends_at > 2:
        assert all(parts != (1, 1) for _, parts in again), "It has the parts of its epoch."


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_ranks_begins_equal(ranks, tmp_path):
    case = ("auto", "arrays", str(tmp_path), None)
    ranks(2).run(cases.ended, *case)
    (parts,) = ranks(3, "mirrored").run(cases.resumed_parts, *case)
    assert parts == (1, 1, 1)
