"""Checks pipelines under strategies on real ranks: equal training for any number of ranks."""

import numpy as np
import pytest

from tests.data import cases
from tests.data.conftest import records
from tfdml.data import write_tfrecords
from tfdml.data.read.ledger import Account

# In seconds; a loaded machine needs long to trace the first step.
LIMIT = 180.0
STEPS = -(-cases.SAMPLES // cases.BATCH)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("ranks"))
    write_tfrecords(records(cases.SAMPLES), path, shards=1)
    return path


def same(one: dict, other: dict) -> None:
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-5)
    for a, b in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("end", ["exact", "pad", "drop"])
def test_training_is_the_same_on_one_and_two_ranks(ranks, directory, end):
    (one,), two = (ranks(size).run(fit_with_end, directory, end, timeout=LIMIT) for size in (1, 2))
    assert len(one["losses"]) == 2 * (STEPS - (end == "drop"))
    for result in two:
        same(one, result)


def test_outside_of_the_scope_every_rank_reads_all(ranks, directory):
    (one,), two = (
        ranks(size).run(fit_with_end, directory, "exact", size == 1, timeout=LIMIT)
        for size in (1, 2)
    )
    for result in two:
        same(one, result)


def fit_with_end(directory: str, end: str, in_scope: bool = True) -> dict:
    return cases.fit(directory, 2, end=end, in_scope=in_scope)


def fit_with_ledger(directory: str, ledger: str, *arguments) -> dict:
    return cases.fit(directory, 3, *arguments, ledger=ledger)


def test_each_rank_reads_its_own_rows_only(ranks, directory):
    (alone,), parts = (ranks(size).run(cases.own_ids, directory, timeout=LIMIT) for size in (1, 2))
    assert [len(step) for step in parts[0]] == [6] * (STEPS - 1) + [2]
    for whole, *own in zip(alone, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(own), whole)
    assert sorted(np.concatenate(alone)) == list(range(cases.SAMPLES))


def test_resume_within_an_epoch_at_another_number_of_ranks(ranks, directory, tmp_path):
    whole = ranks(1).run(fit_with_ledger, directory, str(tmp_path / "whole"), timeout=LIMIT)[0]
    ledger = str(tmp_path / "parts")
    # Ended in the second epoch after 4 batches on 2 ranks; resumed on 1, then on 2.
    first = ranks(2).run(fit_with_ledger, directory, ledger, None, None, STEPS + 4, timeout=LIMIT)[
        0
    ]
    assert (first["state"]["epoch"], first["state"]["sample"]) == (1, 4 * cases.BATCH)
    second = ranks(1).run(fit_with_ledger, directory, ledger, first["state"], first["weights"], 2)[
        0
    ]
    assert second["state"]["sample"] == 6 * cases.BATCH
    third = ranks(2).run(
        fit_with_ledger, directory, ledger, second["state"], second["weights"], timeout=LIMIT
    )[0]
    for a, b in zip(whole["weights"], third["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for notes in (str(tmp_path / "whole"), ledger):
        account = Account(notes)
        assert (account.problems, account.unfinished) == ([], [])
        assert account.epochs == dict.fromkeys(range(3), cases.SAMPLES)


def test_evaluate_and_predict(ranks, directory):
    (one,), two = (
        ranks(size).run(cases.evaluate_and_predict, directory, timeout=LIMIT) for size in (1, 2)
    )
    for loss, predicted in two:
        assert loss == pytest.approx(one[0], rel=1e-5)
        np.testing.assert_allclose(predicted, one[1], rtol=1e-5, atol=1e-6)
