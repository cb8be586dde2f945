"""The same program with faults on purpose, through the layer that `tfdml chaos` uses."""

import json
import os
import random
import signal

import pytest

from tests.checkpointing import cases
from tests.harness.pool import RankFailure
from tfdml.checkpointing import chaos
from tfdml.checkpointing.chaos import Fault, Plan


def train(plan: str, size: int) -> dict:
    os.environ[chaos.VARIABLE] = plan
    try:
        return cases.train(json.loads(plan)["directory"], strategy=size > 1, epochs=2)
    finally:
        del os.environ[chaos.VARIABLE]


def start(ranks, size: int, directory: str, fault: Fault | None = None, rank: int = 0):
    """Runs the program; returns its exit codes, None if it died."""
    plan = Plan(directory, fault, rank).to_json()
    try:
        return [r["code"] for r in ranks(size).run(train, plan, size, timeout=40)]
    except RankFailure:
        return None


def campaign(ranks, tmp_path, size: int, planned: list[Fault], numbers: random.Random) -> int:
    """Runs the program with faults, five to a run; returns how many faults there were."""
    whole = str(tmp_path / "whole")
    assert start(ranks, size, whole) == [0] * size
    happened, left = 0, list(planned)
    while left:
        directory = str(tmp_path / f"run{len(left)}")
        done = []
        while left and len(done) < 5:
            fault = left.pop()
            if fault.where == "between":
                if os.path.exists(directory) and chaos.damage(directory, fault):
                    done.append(fault)
                continue
            ended = start(ranks, size, directory, fault, numbers.randrange(size))
            if ended == [0] * size and fault.kind != "short write":
                break  # Over before the fault.
            if fault.kind == "SIGTERM":
                assert ended == [75] * size
            done.append(fault)
        assert start(ranks, size, directory) == [0] * size, done
        assert chaos.differences(whole, directory) == [], done
        happened += len(done)
    return happened


def counts(ranks, tmp_path) -> dict:
    start(ranks, 1, str(tmp_path / "counted"))
    return json.loads((tmp_path / "counted.counts").read_text())


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_few_faults(ranks, tmp_path, size):
    planned = [
        Fault("power", "operation", 13),
        Fault("bit flip", "between", 12345),
        Fault("ENOSPC", "operation", 20),
        Fault("SIGTERM", "step", 4),
        Fault("SIGKILL", "restore"),
        Fault("SIGKILL", "operation", 8),
    ]
    assert campaign(ranks, tmp_path, size, planned[:5] if size == 2 else planned,
                    random.Random(1)) >= 4  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("size", "number"), [(1, 150), (2, 60)])
def test_random_faults(ranks, tmp_path, size, number):
    """A nightly run: 210 faults, and no run is lost."""
    numbers = random.Random(size)
    found = counts(ranks, tmp_path)
    planned = []
    while len(planned) < number:
        fault = chaos.random_fault(numbers, found, 1000)
        if fault.kind != "SIGSTOP":  # The pool's ranks are not watched for it; the command's are.
            planned.append(fault)
    happened = campaign(ranks, tmp_path, size, planned, numbers)
    print(f"{happened} faults on {size} ranks")
    assert happened > 0.7 * number


def test_a_different_end_is_seen(ranks, tmp_path):
    """The comparison itself can fail."""
    ends = [str(tmp_path / name) for name in "ab"]
    start(ranks, 1, ends[0])
    ranks(1).run(train_longer, ends[1])
    assert any(name.startswith("model/") for name in chaos.differences(*ends))


def train_longer(directory: str) -> None:
    cases.train(directory, epochs=3)


def test_plans_are_json():
    plan = Plan("there", Fault("SIGKILL", "step", 3), 1)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(Plan("there").to_json()).fault is None
    assert signal.Signals["SIGKILL"]
