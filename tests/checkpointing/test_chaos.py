"""Checks resuming under injected faults, through the layer that `tfdml chaos` uses."""

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator

import pytest

from tests.checkpointing import cases
from tests.harness.pool import RankFailure
from tfdml.checkpointing import chaos
from tfdml.checkpointing.chaos import Fault, FaultPlan
from tfdml.cli.chaos_campaign import kill_stopped


def train(plan: str, size: int) -> dict:
    os.environ[chaos.VARIABLE] = plan
    try:
        return cases.train(json.loads(plan)["directory"], strategy=size > 1, epochs=2)
    finally:
        del os.environ[chaos.VARIABLE]


@contextlib.contextmanager
def stopped_ranks_are_killed() -> Iterator[None]:
    """Context manager: kills ranks stopped by a fault, as `tfdml chaos` does after a while."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            kill_stopped()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def start(ranks, size: int, directory: str, fault: Fault | None = None, rank: int = 0):
    """Runs the program; returns its exit codes, None if it died."""
    plan = FaultPlan(directory, fault, rank).to_json()
    try:
        with stopped_ranks_are_killed():
            return [r["code"] for r in ranks(size).run(train, plan, size, timeout=40)]
    except RankFailure:
        return None


def campaign(
    ranks, tmp_path, size: int, faults: Iterable[Fault], number: int, numbers: random.Random
) -> int:
    """Runs the program with up to five faults per run, until a total number is reached.

    A fault scheduled after the end of a run does not count.

    Returns:
        Number of faults.
    """
    whole = str(tmp_path / "whole")
    assert start(ranks, size, whole) == [0] * size
    faults, happened, runs = iter(faults), 0, 0
    while happened < number and (fault := next(faults, None)):
        runs += 1
        directory = str(tmp_path / f"run{runs}")
        done = []
        while fault is not None:
            if fault.where != "between":
                ended = start(ranks, size, directory, fault, numbers.randrange(size))
                if ended == [0] * size and fault.kind != "short write":
                    break  # The run ended before the fault.
                if fault.kind == "SIGTERM":
                    assert ended == [75] * size, (done, fault)
                done.append(fault)
            elif os.path.exists(directory) and chaos.damage(directory, fault):
                done.append(fault)
            fault = next(faults, None) if len(done) < min(5, number - happened) else None
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
        Fault("SIGSTOP", "operation", 8),
        Fault("SIGKILL", "operation", 8),
    ]
    planned = planned[: 7 if size == 1 else 5]
    assert campaign(ranks, tmp_path, size, planned, len(planned), random.Random(1)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "number", "seed"),
    [(1, 40, 1), (1, 40, 2), (1, 40, 3), (1, 40, 4), (2, 30, 5), (2, 30, 6)],
)
def test_random_faults(ranks, tmp_path, size, number, seed):
    """A nightly run: 220 faults in all, and no run is lost."""
    numbers = random.Random(seed)
    found = counts(ranks, tmp_path)
    faults = (chaos.random_fault(numbers, found, 1000) for _ in itertools.count())
    assert campaign(ranks, tmp_path, size, faults, number, numbers) == number


def test_timed_fault_does_not_outlive_its_run(ranks, tmp_path):
    """By then the process may run something else."""
    late = Fault("SIGKILL", "time", 3_000)
    assert start(ranks, 1, str(tmp_path / "run"), late) == [0]
    assert ranks(1).run(time.sleep, 4.0) == [None]


def test_comparison_detects_a_different_result(ranks, tmp_path):
    """Makes sure that the comparison itself can fail."""
    ends = [str(tmp_path / name) for name in "ab"]
    start(ranks, 1, ends[0])
    ranks(1).run(train_longer, ends[1])
    assert any(name.startswith("model/") for name in chaos.differences(*ends))


def train_longer(directory: str) -> None:
    cases.train(directory, epochs=3)


def test_plans_are_json():
    plan = FaultPlan("there", Fault("SIGKILL", "step", 3), 1)
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert FaultPlan.from_json(FaultPlan("there").to_json()).fault is None
    assert signal.Signals["SIGKILL"]
