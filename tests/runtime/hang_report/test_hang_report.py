"""Checks that reports name the rank that keeps the others waiting, and where it is."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool import RankFailure
from tests.runtime.hang_report import hang_cases as cases
from tfdml.runtime.hang_report import job_files
from tfdml.runtime.launch.processes import alive, end_processes, process_tree
from tfdml.topology import child_environment

PROGRAM = Path(__file__).with_name("hang_program.py")
TFDML = [sys.executable, "-m", "tfdml.cli.main"]
DIFFERENCE = "first difference: "


@pytest.mark.parametrize("kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)])
def test_a_rank_that_sleeps_in_a_callback_is_named_with_its_line(ranks, kind):
    (summary, report), (_, sleeping) = ranks(2, kind).run(cases.sleeping_in_a_callback)
    first = summary.splitlines()[0].removeprefix(DIFFERENCE)
    assert re.fullmatch(
        r"rank 1 never began train_step/\S+ \(all_\w+\), in which rank 0 waits; it is in "
        r"sleep_until_reported at hang_cases.py:\d+\.",
        first,
    ), summary
    assert re.search(r"waits in: train_step/\S+ \(all_\w+\), turn \d+", summary)
    assert re.search(r"train_step/\S+ \(all_\w+\), turn \d+: not done for [1-9]", report), report
    assert re.search(r"train_step/\S+ \(all_\w+\), turn \d+: done in \d+\.\d\d ms", report)
    assert "in sleep_until_reported" in sleeping


def test_the_guards_message_has_the_first_difference(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.eager_exchanges_in_two_orders)
    message = str(failure.value)
    assert "waits in all_reduce of " in message
    assert re.search(
        r"first difference: rank 1 never began one \(all_reduce\), in which rank 0 waits; it began "
        r"other \(all_reduce\) instead, in eager_exchanges_in_two_orders at hang_cases.py:\d+\.",
        message,
    ), message
    assert re.search(r"report: /\S+/report-\S+", message)


def test_each_exchange_of_a_step_is_noted_once_in_its_turn(ranks):
    for exchanges, grown, files in ranks(2).run(cases.last_exchanges, 150):
        of_step = {name: n for name, n in grown.items() if name.startswith("train_step/")}
        assert set(of_step.values()) == {150}
        assert len(of_step) >= 2
        assert all(e.done is not None and e.done >= e.begun for e in exchanges)
        assert [e.begun for e in exchanges] == sorted(e.begun for e in exchanges)
        assert len({(e.name, e.turn) for e in exchanges}) == len(exchanges)
        assert files[0].startswith("rank")


# -- Jobs of their own -----------------------------------------------------------------------------


@contextlib.contextmanager
def started(tmp_path: Path, kind: str, size: int, fault: str, rank: int) -> Iterator:
    """Starts the program on real ranks; its processes are ended afterwards."""
    command = [*TFDML, "launch", "--workers", str(size), "--job-dir", str(tmp_path / "job")]
    if kind == "horovod":
        command.append("--horovod")
    command += [str(PROGRAM), str(tmp_path), kind, fault, str(rank)]
    environment = child_environment(PYTHONPATH=str(PROGRAM.parents[3]), TF_NUM_INTRAOP_THREADS="1")
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "fault").exists():
            assert time.monotonic() < deadline, read_output(tmp_path)
            assert job.poll() is None, read_output(tmp_path)
            time.sleep(0.1)
        yield job
    finally:
        tree = process_tree(job.pid)
        end_processes(tree[:1], 15.0)
        end_processes(alive(tree), 1.0)


def read_output(tmp_path: Path) -> str:
    return (tmp_path / "output").read_text()


def ask_until(found: str, *arguments: object) -> str:
    """Runs `tfdml hang-report` until its first line is as expected, which it is once all wait.

    Args:
        found: Regular expression of the first difference.
        *arguments: Arguments of the command.

    Returns:
        The last output.
    """
    command = [*TFDML, "hang-report", *map(str, arguments)]
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        if re.match(DIFFERENCE + found, done.stdout) or time.monotonic() > deadline:
            return done.stdout + done.stderr


KINDS = ("horovod", "multi_worker")
SOON = r"rank 1 never began train_step/\S+ \(all_reduce\), in which rank 0 waits; it is in hang at "
SECOND = (
    r"rank 1 never began train_step/first \(all_reduce\), in which rank 0 waits; it began "
    r"train_step/second \(all_reduce\) instead, "
)
PLACES = {
    "sleep": SOON + r"hang_program.py:\d+",
    "lock": SOON + r"hang_program.py:\d+",
    "skip": SECOND,
    "swap": SECOND,
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("multi_worker", "lock"),
        *[
            pytest.param(kind, fault, marks=pytest.mark.slow)
            for kind in KINDS
            for fault in PLACES
            if (kind, fault) != ("multi_worker", "lock")
        ],
    ],
)
def test_a_running_job_is_asked_by_its_directory(tmp_path, kind, fault):
    with started(tmp_path, kind, 2, fault, 1):
        output = ask_until(PLACES[fault], "--job", tmp_path / "job")
    assert re.match(DIFFERENCE + PLACES[fault], output), output


@pytest.mark.slow
def test_a_running_job_is_asked_by_any_of_its_processes(tmp_path):
    with started(tmp_path, "multi_worker", 2, "sleep", 1):
        processes = job_files.processes_of(tmp_path / "job")
        outputs = [ask_until(PLACES["sleep"], "--pid", pid) for pid in processes.values()]
    assert list(processes) == [0, 1]
    for output in outputs:
        assert re.match(DIFFERENCE + PLACES["sleep"], output), output


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 2])
def test_of_three_ranks_the_odd_one_is_named(tmp_path, kind, rank):
    others = " and ".join(str(r) for r in range(3) if r != rank)
    found = (
        rf"rank {rank} never began train_step/first \(all_reduce\), in which ranks {others} wait; "
        r"it began train_step/second \(all_reduce\) instead, "
    )
    with started(tmp_path, kind, 3, "swap", rank):
        output = ask_until(found, "--job", tmp_path / "job")
    assert re.match(DIFFERENCE + found, output), output


STATES = {
    "gil": ("fell silent", "runs, but not its Python: a thread holds the interpreter's lock"),
    "SIGSTOP": ("fell silent", r"is stopped \(SIGSTOP, a debugger\)"),
    "SIGKILL": ("died", "has died"),
}


@pytest.mark.parametrize(
    ("kind", "fault", "rank"),
    [
        ("horovod", "gil", 1),
        *[
            pytest.param(kind, fault, rank, marks=pytest.mark.slow)
            for kind in KINDS
            for fault in STATES
            for rank in (0, 1)
            if (kind, fault, rank) != ("horovod", "gil", 1)
        ],
    ],
)
def test_a_rank_that_cannot_speak_is_looked_at_before_the_job_ends(tmp_path, kind, fault, rank):
    with started(tmp_path, kind, 2, fault, rank) as job:
        job.wait(90)
    output = read_output(tmp_path)
    why, state = STATES[fault]
    assert re.search(rf"on all 2 ranks, because rank {rank} {why}", output), output[-5000:]
    found = re.search(
        rf"{DIFFERENCE}rank {rank} {state}, while rank {1 - rank} waits in .*", output
    )
    assert found, output[-5000:]
    assert re.search(r"waits in train_step/\S+ \(all_reduce\)", found[0])
    if fault == "gil":
        assert re.search(r"it was in hang at hang_program.py:\d+", found[0])
    else:
        assert "on_train_batch_end" in found[0]
