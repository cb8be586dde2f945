"""Checks that divided slots survive checkpoints, files, and other numbers of ranks."""

import numpy as np
import pytest

from tests.strategies.sharded import cases

NAMES = [
    "adam",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("unknown", "row_wise_adagrad")),
]


def _same(expected: list[np.ndarray], found: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((2, True), (2, True), marks=pytest.mark.slow),
        ((3, True), (2, True)),
        pytest.param((2, True), (1, False), marks=pytest.mark.slow),
        pytest.param((1, False), (2, True), marks=pytest.mark.slow),
        pytest.param((2, False), (3, True), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_resumes_on_other_ranks_with_or_without_sharding(
    ranks, tmp_path, name, first, second
):
    (size, sharded), (other_size, other_sharded) = first, second
    begun = ranks(size).run(cases.resumed, str(tmp_path), 1, name, sharded)[0]
    kept = ranks(other_size).run(cases.resumed, str(tmp_path), 1, name, other_sharded)
    for result in kept:
        assert _same(begun["weights"], result["weights"])
        assert _same(begun["slots"], result["slots"])
    on = ranks(other_size).run(cases.resumed, str(tmp_path), 2, name, other_sharded)
    assert not _same(begun["slots"], on[0]["slots"]), "It trained on."
    if size == other_size:
        whole = ranks(size).run(cases.trained, name, sharded)[0]
        assert _same(whole["weights"], on[0]["weights"])
        assert _same(whole["slots"], on[0]["slots"])


@pytest.mark.parametrize("by_callback", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_has_whole_slots(ranks, tmp_path, name, by_callback):
    path = str(tmp_path / "model.keras")
    written = ranks(2).run(cases.saved, path, name, True, by_callback)[0]
    (without,) = ranks(1).run(cases.loaded, path, False)
    assert _same(written["slots"], without["before"])
    expected = ranks(2).run(cases.loaded, path, False)[0]
    for result in ranks(2).run(cases.loaded, path, True):
        assert _same(written["slots"], result["before"])
        assert _same(expected["weights"], result["weights"])
        assert _same(expected["slots"], result["slots"])


@pytest.mark.slow
def test_backup_and_restore_restores_slots(ranks, tmp_path):
    for sharded in (False, True):
        directory = str(tmp_path / str(sharded))
        ranks(2).run(cases.backed_up, directory, "adam", sharded, 1)
        resumed = ranks(2).run(cases.backed_up, directory, "adam", sharded, 2)[0]
        if not sharded:
            expected = resumed
    assert _same(expected["weights"], resumed["weights"])
    assert _same(expected["slots"], resumed["slots"])
