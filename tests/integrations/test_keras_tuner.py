"""Checks that all ranks of a job train the same trials of KerasTuner, and rank 0 writes them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import side_environment

PROGRAM = "tests.integrations.keras_tuner_program"
SEARCHES = ["random:2", "random:4", "failing:6", "hyperband:3"]


def _run(home: Path, ranks: int, kind: str = "horovod") -> list[list[dict]]:
    """Returns the reports on the searches, by rank."""
    python = side_environment.tuners_python()
    command = [python, "-m"]
    if ranks > 1 and kind == "horovod":
        command = [Path(sys.executable).parent / "horovodrun", "-np", str(ranks), *command]
    elif ranks > 1:
        command += ["tfdml.cli.main", "launch", "--workers", str(ranks), "-m"]
    subprocess.run(
        [*command, PROGRAM, home, *SEARCHES],
        cwd=side_environment.ROOT,
        env={**os.environ, "TFDML_TEST_KIND": kind, "PYTHONPATH": str(side_environment.ROOT)},
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=400,
    )
    return [
        [json.loads((home / f"{i}-rank{rank}.json").read_text()) for i in range(len(SEARCHES))]
        for rank in range(ranks)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    """Returns the reports of one process."""
    return _run(tmp_path_factory.mktemp("alone"), 1)[0]


def _without(report: dict, *keys: str) -> dict:
    return {key: value for key, value in report.items() if key not in keys}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_all_ranks_train_the_same_trials(alone, tmp_path, kind):
    """The same values, scores and winner as on one process; a search goes on where it ended."""
    reports = _run(tmp_path, 2, kind)
    for one, chief, other in zip(alone, *reports, strict=True):
        # Also those that failed, and the winner's weights, which rank 0 alone has on its disk.
        assert _without(chief, "files") == _without(other, "files")
        assert chief["remaining"] == one["remaining"]
        assert other["files"] == [f for f in other["files"] if re.search(r"tuner0.json|/build_", f)]
        assert any(f.endswith("checkpoint.weights.h5") for f in chief["files"])
    for search in (0, 1, 3):
        one, chief = alone[search], reports[0][search]
        assert chief["best"] == one["best"]
        assert chief["trials"].keys() == one["trials"].keys()  # In the order of a directory.
        for name, (status, values, score, _) in chief["trials"].items():
            assert status == "COMPLETED"
            assert values == one["trials"][name][1]
            assert score == pytest.approx(one["trials"][name][2], rel=1e-4)
        assert chief["loss"] == pytest.approx(one["loss"], rel=1e-4)
    first, second = reports[0][:2]
    assert {name: second["trials"][name] for name in first["trials"]} == first["trials"]
    _check_failures(alone[2], reports[0][2])


def _check_failures(one: dict, chief: dict) -> None:
    failed = {name for name, trial in chief["trials"].items() if trial[0] == "FAILED"}
    impossible = {name for name, trial in chief["trials"].items() if trial[1]["impossible"]}
    assert impossible
    assert failed == impossible | {"2", "3"}
    assert {n for n, trial in one["trials"].items() if trial[0] == "FAILED"} == impossible
    for name in ("2", "3"):
        message = chief["trials"][name][3]
        assert re.search(r"On rank 1: .*FileNotFoundError: no disk here", message, re.S)
