"""Checks that usage notes prove an epoch exact: lost and repeated samples are detected."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tfdml.cli.records import app
from tfdml.data import read_tfrecords

BATCH, SAMPLES, STEPS = 12, 100, 9


def use(manifest, ledger: Path, workers: int, state: dict | None, epoch: int, end: int) -> dict:
    """Makes all workers of a job use an epoch's batches up to `end`; returns the state then."""
    for rank in range(workers):
        pipeline = read_tfrecords(
            manifest.directory,
            BATCH,
            features=["id"],
            seed=3,
            # A pipeline needs only the rank and size from a strategy.
            strategy=SimpleNamespace(num_replicas_in_sync=workers, size=workers, rank=rank),
            state=state,
            ledger=str(ledger),
        )
        pipeline.begin_epoch(epoch)
        begin = pipeline.state()["sample"] // BATCH
        # All remaining batches are prefetched; only some are used.
        for _ in pipeline:
            pass
        for step in range(begin, end):
            pipeline.used(step + 1 - begin)
    return pipeline.state()


@pytest.fixture
def used(dataset, tmp_path) -> Path:
    """Writes notes of two epochs: by 2 interrupted workers, 3 that resumed, and 1."""
    manifest, ledger = dataset(), tmp_path / "notes"
    state = use(manifest, ledger, 2, None, 0, 4)
    assert state["sample"] == 4 * BATCH
    use(manifest, ledger, 3, state, 0, STEPS)
    use(manifest, ledger, 1, None, 1, STEPS)
    return ledger


def prove(dataset_directory: Path, ledger: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", str(dataset_directory), "--ledger", str(ledger)])
    return done.exit_code, done.output


def notes_of(ledger: Path, worker: str) -> Path:
    (path,) = ledger.glob(f"*-{worker}.jsonl")
    return path


def test_a_crash_and_another_number_of_workers_lose_nothing(used, tmp_path):
    code, output = prove(tmp_path / "set", used)
    assert code == 0, output
    assert f"epoch 0: {SAMPLES} samples used, whole" in output
    assert f"epoch 1: {SAMPLES} samples used, whole" in output
    assert "No sample was used twice or lost." in output


def test_missing_notes_of_a_worker_are_detected(used, tmp_path):
    notes_of(used, "1-of-3").unlink()
    code, output = prove(tmp_path / "set", used)
    assert code == 1
    assert "epoch 0, the batch from sample 48 on: 8 samples used instead of 12" in output
    assert "samples never used" in output


def test_sample_used_twice_is_detected(used, tmp_path):
    path = notes_of(used, "0-of-1")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    read = [line for line in lines if "ids" in line]
    assert len(read) == STEPS
    read[1]["ids"][0] = read[0]["ids"][0]
    path.write_text("\n".join(map(json.dumps, lines)))
    code, output = prove(tmp_path / "set", used)
    assert code == 1
    assert "epoch 1: 1 samples used twice" in output


def test_unused_batches_are_detected(used, tmp_path):
    path = notes_of(used, "0-of-1")
    lines = [line for line in path.read_text().splitlines() if '"used":[1,24,36]' not in line]
    path.write_text("\n".join(lines))
    code, output = prove(tmp_path / "set", used)
    assert code == 1
    assert "epoch 1: 12 samples never used" in output


def test_unfinished_epoch_is_accepted(dataset, tmp_path):
    manifest = dataset()
    use(manifest, tmp_path / "notes", 2, None, 0, 4)
    code, output = prove(tmp_path / "set", tmp_path / "notes")
    assert code == 0
    assert "epoch 0: 48 samples used, incomplete" in output


def test_notes_of_other_data_or_no_notes(used, dataset, tmp_path):
    path = notes_of(used, "0-of-1")
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first.replace('"seed":3', '"seed":4'), *rest]))
    code, output = prove(tmp_path / "set", used)
    assert code == 1
    assert "the runs differ in their data, order or batch size" in output
    for notes in used.iterdir():
        notes.write_text(f"{first}\n")
    code, output = prove(tmp_path / "set", used)
    assert code == 1
    assert "no batch was used, so the ledger proves nothing" in output
    (tmp_path / "empty").mkdir()
    code, output = prove(tmp_path / "set", tmp_path / "empty")
    assert code == 1
    assert "`ledger` must be a directory with a ledger" in output
