"""Checks which process this is, according to its launcher's environment variables."""

import json

import pytest

from tfdml.topology import (
    Topology,
    change_environment,
    is_first_on_host,
    launched,
    local_variables,
    own_host,
    setting,
    started_together,
)

HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


def test_process_without_launcher_is_its_own_job():
    assert launched({}) == Topology(0, 1, 0, 1, None)


@pytest.mark.parametrize(
    "names",
    [
        HOROVOD,
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ],
)
def test_environment_of_each_launcher_is_read(names):
    topology = launched(
        dict(zip(names, "5812", strict=True)) | {names[1]: "8", names[2]: "1", names[3]: "4"}
    )
    assert (topology.rank, topology.size, topology.local_rank, topology.local_size) == (5, 8, 1, 4)
    assert topology.launcher is not None
    assert not topology.is_chief


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HOROVOD_RANK": "0"}, "`HOROVOD_SIZE` must be a non-negative integer.*=None"),
        (
            {
                "HOROVOD_RANK": "x",
                "HOROVOD_SIZE": "2",
                "HOROVOD_LOCAL_RANK": "0",
                "HOROVOD_LOCAL_SIZE": "1",
            },
            "`HOROVOD_RANK` must be a non-negative integer.*'x'",
        ),
        (
            {
                "HOROVOD_RANK": "2",
                "HOROVOD_SIZE": "2",
                "HOROVOD_LOCAL_RANK": "0",
                "HOROVOD_LOCAL_SIZE": "1",
            },
            "`rank` must be from 0 to `size` - 1. Received: rank=2, size=2",
        ),
    ],
)
def test_contradictions_are_errors(environment, message):
    with pytest.raises(ValueError, match=message):
        launched(environment)


def cluster(task: str, index: int, **jobs: int) -> dict[str, str]:
    addresses = {job: [f"{job}{i}:1" for i in range(n)] for job, n in jobs.items()}
    return {"TF_CONFIG": json.dumps({"cluster": addresses, "task": {"type": task, "index": index}})}


@pytest.mark.parametrize(
    ("environment", "rank_and_size"),
    [
        (cluster("worker", 1, worker=2), (1, 2)),
        (cluster("worker", 0, worker=2, chief=1), (1, 3)),
        (cluster("worker", 0, worker=1), (0, 1)),
        # Neither trains as part of a job.
        (cluster("evaluator", 0, worker=2, evaluator=1), (0, 1)),
        (cluster("chief", 0, chief=1, worker=2, ps=1), (0, 1)),
        ({"TF_CONFIG": "no JSON"}, (0, 1)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0",
          "HOROVOD_LOCAL_SIZE": "1"}, (1, 3)),
        # `srun` sets these for any program.
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (0, 1)),
    ],
)  # fmt: skip
def test_processes_started_together_are_detected(environment, rank_and_size):
    found = started_together(environment)
    assert (found.rank, found.size) == rank_and_size


def test_host_named_by_the_launcher():
    assert own_host(cluster("worker", 1, worker=2)) == "worker1"
    assert own_host({"HOROVOD_HOSTNAME": "node1"}) == "node1"
    address = {"cluster": {"worker": ["[fd00::1]:5"]}, "task": {"type": "worker", "index": 0}}
    assert own_host({"TF_CONFIG": json.dumps(address)}) == "fd00::1"
    assert own_host({}) is None
    assert own_host({"TF_CONFIG": '{"task": {"type": "worker", "index": 3}}'}) is None


def test_variables_are_changed_and_removed(monkeypatch):
    monkeypatch.setenv("TFDML_TEST_OLD", "1")
    monkeypatch.setenv("TFDML_TEST_NEW", "1")
    change_environment({"TFDML_TEST_OLD": None, "TFDML_TEST_NEW": "2", "TFDML_TEST_NONE": None})
    assert (setting("TFDML_TEST_OLD", "none"), setting("TFDML_TEST_NEW")) == ("none", "2")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        (local_variables(0, 2), True),
        (local_variables(1, 2), False),
        (dict(zip(HOROVOD, "2402", strict=True)), True),
        (dict(zip(HOROVOD, "3412", strict=True)), False),
        # `srun` sets it for any program, and nothing else of MPICH's.
        ({"PMI_RANK": "1"}, True),
    ],
)
def test_first_process_of_a_host(environment, expected):
    assert is_first_on_host(environment) == expected
