"""Runs README's commands in an empty directory on its own `train.py`: nothing else is needed."""

import csv
import re
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import README, ROOT
from tfdml.horovod_build import child
from tfdml.topology import child_environment, setting

WORKERS = [
    "tfdml launch --workers 2 train.py",
    "tfdml checkpoints inspect run1",
    "rm -r run1 log.csv",
    "python train.py",
]
HOROVOD = ["horovodrun -np 2 python train.py", "tfdml launch --horovod --workers 2 train.py"]
# Commands that are not run here, and why.
ELSEWHERE = {
    "tools/wheel": "tests/tools/test_wheel.py builds the wheel",
    "pip install 'dist/tfdml-0.1.0-py3-none-any.whl[cpu]'": "needs a package registry; "
    "tests/tools/test_wheel.py installs the wheel",
    "tfdml doctor": "tests/cli/test_doctor.py runs it",
    "tfdml test": "takes longer than all of this; it has tests of its own in tests/cli",
    "tfdml launch --hosts node1:1,node2:1 train.py": "needs a second machine; "
    "tests/runtime/launch/test_hosts.py launches on hosts of the network lab",
}
EPOCHS = 10
# All output that a run may print: nothing that a reader has to look up.
WHERE = r"(, step \d+/36, .* left|, validation step \d+)?"
PROGRESS = rf"Epoch \d+/10{WHERE}: .* - accuracy: .* - loss: .*"
SAVE_COST = r"tfdml: checkpoints take .* % of training time.*"


def train_program() -> str:
    """Returns README's `train.py`."""
    (program,) = [b.text for b in pages.blocks(README) if "FaultTolerantCheckpoint" in b.text]
    return program


def run(command: str, directory: Path) -> str:
    """Runs one of README's commands in a directory; returns its output."""
    environment = child_environment(
        PATH=f"{Path(sys.executable).parent}:{setting('PATH')}",
        PYTHONPATH=str(ROOT),
        TF_NUM_INTRAOP_THREADS="1",
        COLUMNS="120",
    )
    ended = child.run(["bash", "-c", command], environment=environment, timeout=300, cwd=directory)
    assert ended.ok, f"{command}\n{ended.output}"
    return ended.output


def accuracies(directory: Path) -> list[float]:
    """Returns each epoch's validation accuracy, as the logger wrote it."""
    with (directory / "log.csv").open() as file:
        return [float(row["val_accuracy"]) for row in csv.DictReader(file)]


def test_each_command_is_run_or_has_a_reason():
    commands = [line for block in pages.blocks(README) for line in pages.command_lines(block)]
    assert sorted(commands) == sorted([*WORKERS, *HOROVOD, *ELSEWHERE])


def test_commands_run_elsewhere_have_a_test_there():
    for reason in ELSEWHERE.values():
        for file in re.findall(r"tests/[\w/]+(?:\.py)?", reason):
            assert (ROOT / file).exists(), file


@pytest.mark.slow
def test_workers(tmp_path):
    (tmp_path / "train.py").write_text(train_program())
    launch, inspect, remove, alone = WORKERS
    output = run(launch, tmp_path)
    for line in output.splitlines():
        assert re.fullmatch(rf"\[0\] ({PROGRESS}|{SAVE_COST})", line), line
    assert f"Epoch {EPOCHS}/{EPOCHS}" in output
    on_two = accuracies(tmp_path)
    # One logger wrote, once per epoch, and the model has improved.
    assert len(on_two) == EPOCHS
    assert on_two[-1] > 0.75
    assert (tmp_path / "model.keras").stat().st_size > 10_000
    assert "finished" in run(inspect, tmp_path)
    run(remove, tmp_path)
    (tmp_path / "model.keras").unlink()
    run(alone, tmp_path)
    on_one = accuracies(tmp_path)
    assert len(on_one) == EPOCHS
    assert on_one[-1] > 0.75
    assert (tmp_path / "model.keras").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", HOROVOD)
def test_horovod(tmp_path, command):
    changed = "tfdml.HorovodStrategy("
    program = train_program().replace("tfdml.MultiWorkerMirroredStrategy(", changed)
    assert f'strategy = {changed}compression="powersgd")' in README.read_text(encoding="utf-8")
    assert program.count(changed) == 1
    (tmp_path / "train.py").write_text(program)
    assert f"Epoch {EPOCHS}/{EPOCHS}" in run(command, tmp_path)
    assert len(accuracies(tmp_path)) == EPOCHS
    assert accuracies(tmp_path)[-1] > 0.75
