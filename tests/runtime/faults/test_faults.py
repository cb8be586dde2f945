"""Checks that any fault of a rank ends the job everywhere, soon, and with its cause."""

import re

import pytest

from tests.runtime.faults.jobs import run_job, run_on_hosts
from tests.tools.test_netlab import needs_root

# Seconds from the fault to the launcher's end: the program's limit of silence is 3, the
# ranks end within 10 after it, and the launcher ends a stopped one by SIGTERM and then SIGKILL.
SOON = {"SIGSTOP": 45.0}

CAUSES = {
    "raise": ("raised an exception", "ValueError: the mistake of this test"),
    "SIGKILL": ("died", "killed"),
    "SIGTERM": ("died", "killed"),
    "SIGSTOP": ("fell silent", "stopped"),
    "exit": ("died", "`os._exit`"),
}
CODES = {"raise": 1, "exit": 3, "SIGKILL": 137, "SIGTERM": 143}


def check(tmp_path, kind, size, fault, where, rank, *more):
    job = run_job(tmp_path, kind, size, fault, where, rank, *more)
    assert job.code == CODES.get(fault, job.code)
    assert_named(job, kind, size, fault, rank)
    return job


def assert_named(job, kind, size, fault, rank):
    """Checks that a job has ended soon and everywhere, and that its message names the cause."""
    assert job.code not in (0, 124), job.output[-6000:]
    assert job.seconds < SOON.get(fault, 30.0)
    assert not job.left
    why, cause = CAUSES[fault]
    assert re.search(rf"on all {size} ranks, because rank {rank} {why}", job.message), job.output
    assert cause in job.message
    if fault != "SIGSTOP" and kind != "horovod":
        # The guard ended the others, not the launcher some seconds later.
        assert "did not end by itself" not in job.output
    assert re.search(rf"rank {rank}: host \S+, pid \d+", job.message)


# One of each fault and point, over both transports; the slow tests below run all of them.
@pytest.mark.parametrize(
    ("kind", "fault", "where", "rank"),
    [
        ("horovod", "exit", "exchange", 1),
        pytest.param("horovod", "raise", "alone", 1, marks=pytest.mark.slow),
        # `test_guard` covers an exception, `test_activity` its wording, without a launcher.
        pytest.param("multi_worker", "raise", "batch_end", 1, marks=pytest.mark.slow),
        pytest.param("multi_worker", "raise", "data", 0, marks=pytest.mark.slow),
        ("multi_worker", "SIGTERM", "epoch_end", 0),
        pytest.param("multi_worker", "SIGSTOP", "validation", 1, marks=pytest.mark.slow),
    ],
)
def test_a_fault_ends_the_job_everywhere(tmp_path, kind, fault, where, rank):
    job = check(tmp_path, kind, 2, fault, where, rank)
    if where != "data":
        assert "where: fit" in job.message
    if (fault, where) == ("raise", "batch_end"):
        assert "in callback At.on_train_batch_end" in job.message
        assert re.search(r"fault_program.py:\d+ in do_fault", job.message)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        *[("raise", w) for w in ("batch_end", "data", "train_step", "before_the_model")],
        *[("SIGKILL", w) for w in ("train_begin", "validation", "predict", "exchange")],
        *[("SIGTERM", w) for w in ("batch_end", "epoch_end")],
        *[("SIGSTOP", w) for w in ("train_begin", "epoch_end", "exchange", "predict")],
        *[("exit", w) for w in ("batch_end", "exchange", "before_the_model")],
    ],
)
def test_every_fault_at_every_point(tmp_path, kind, size, last, fault, where):
    check(tmp_path, kind, size, fault, where, size - 1 if last else 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "raise"])
@pytest.mark.parametrize(
    ("where", "rank"),
    # Rank 1 owns no part of the gradients, so it does not sum with the other host.
    [
        *[("within", 0), ("within", 1)],
        *[("to_owner", 0), ("to_owner", 2)],
        *[("to_all", 0), ("to_all", 2)],
        *[("to_host", 1), ("to_host", 2)],
    ],
)
def test_a_fault_in_an_exchange_by_hosts(tmp_path, kind, fault, where, rank):
    check(tmp_path, kind, 3, fault, where, rank, 600)


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "raise"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_fault_on_hosts_of_several_ranks(tmp_path, fault, rank):
    """Ranks 0 and 2 speak for their hosts where ranks agree on what is ready; rank 1 does not."""
    job = run_on_hosts(
        tmp_path, "2,1", fault, "batch_end" if fault == "raise" else "exchange", rank
    )
    assert_named(job, "horovod", 3, fault, rank)


@pytest.mark.parametrize(
    ("kind", "fault", "where", "rank"),
    [
        ("horovod", "SIGKILL", "to_wholes", 1),
        *[
            pytest.param(kind, fault, where, rank, marks=pytest.mark.slow)
            for kind in ("horovod", "multi_worker")
            for fault in ("SIGKILL", "SIGSTOP")
            for where in ("to_parts", "to_wholes", "save")
            for rank in (0, 1)
            if (kind, fault, where, rank) != ("horovod", "SIGKILL", "to_wholes", 1)
        ],
    ],
)
def test_a_fault_in_an_exchange_of_parts(tmp_path, kind, fault, where, rank):
    check(tmp_path, kind, 2, fault, where, rank, 600)


@pytest.mark.parametrize(
    ("kind", "fault", "where", "rank"),
    [
        ("horovod", "SIGKILL", "table_rows", 1),
        *[
            pytest.param(kind, fault, where, rank, marks=pytest.mark.slow)
            for kind in ("horovod", "multi_worker")
            for fault in ("SIGKILL", "SIGSTOP")
            for where in ("table_ids", "table_rows", "table_gradients", "save_table")
            for rank in (0, 1)
            if (kind, fault, where, rank) != ("horovod", "SIGKILL", "table_rows", 1)
        ],
    ],
)
def test_a_fault_in_an_exchange_of_rows(tmp_path, kind, fault, where, rank):
    check(tmp_path, kind, 2, fault, where, rank)


@pytest.mark.parametrize(
    ("kind", "fault", "where", "rank"),
    [
        ("horovod", "SIGKILL", "round", 1),
        *[
            pytest.param(kind, fault, where, rank, marks=pytest.mark.slow)
            for kind in ("horovod", "multi_worker")
            for fault in ("SIGKILL", "SIGSTOP", "raise")
            for where in ("round", "synchronization")
            for rank in (0, 1)
            if (kind, fault, where, rank) != ("horovod", "SIGKILL", "round", 1)
            and (fault, where) != ("raise", "synchronization")
        ],
    ],
)
def test_a_fault_with_local_updates(tmp_path, kind, fault, where, rank):
    check(tmp_path, kind, 2, fault, where, rank)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_death_during_a_large_exchange(tmp_path, kind):
    check(tmp_path, kind, 2, "exit", "exchange", 1, 500_000)


@pytest.mark.slow  # By default `test_guard` checks its messages.
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_call_made_by_one_rank_only(tmp_path, kind):
    job = run_job(tmp_path, kind, 2, "none", "evaluate_alone", 0)
    assert job.code not in (0, 124), job.output[-6000:]
    assert job.seconds < 60
    assert not job.left
    assert "Received for call: evaluate on rank 0, fit on rank 1" in job.output or (
        "Received for call: fit on rank 1, evaluate on rank 0" in job.output
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_a_model_with_divided_slots_saved_by_one_rank_only(tmp_path, kind):
    job = run_job(tmp_path, kind, 2, "none", "save_alone", 0, 600)
    assert job.code not in (0, 124), job.output[-6000:]
    assert job.seconds < 60
    assert not job.left
    assert "rank 0 waits in broadcast of save/next" in job.message, job.output[-6000:]
    assert "code that only some ranks run" in job.message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_a_model_with_a_divided_table_called_by_one_rank_only(tmp_path, kind):
    job = run_job(tmp_path, kind, 2, "none", "lookup_alone", 0)
    assert job.code not in (0, 124), job.output[-6000:]
    assert job.seconds < 60
    assert not job.left
    assert re.search(r"where: a lookup in \S*embeddings", job.message), job.output[-6000:]
    assert "code that only some ranks run" in job.message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_a_rank_that_ends_its_program_early(tmp_path, kind):
    """Its exit code is 0; the others wait in vain, or their exchange fails."""
    job = run_job(tmp_path, kind, 2, "sys.exit", "batch_end", 1)
    assert job.code not in (0, 124), job.output[-6000:]
    assert job.seconds < 45
    assert not job.left
    assert "because rank 1" in job.output, job.output[-6000:]
    assert "ended its program, while rank 0 " in job.output, job.output[-6000:]
