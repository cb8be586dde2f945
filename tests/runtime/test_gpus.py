"""Checks that each process sees its own GPUs, and allocates their memory as needed.

No GPU is required: the tests examine TensorFlow's settings before it starts.
"""

import json
from collections.abc import Iterator

import pytest

from tests.harness.pool import RankPool
from tests.runtime import gpu_cases as cases
from tfdml.runtime.gpus import assigned_gpus, server_config
from tfdml.runtime.launch.supervisor import free_ports
from tfdml.topology import Topology, local_variables, on_this_host

ALONE = (0, 1)


def topology_of(local_rank: int, local_size: int) -> Topology:
    return Topology(local_rank, local_size, local_rank, local_size)


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    """Starts processes whose TensorFlow has not started: other tests do not share them."""
    pool = RankPool(1)
    chief, worker, server = (f"127.0.0.1:{port}" for port in free_ports(3))
    cluster = {"chief": [chief], "worker": [worker], "ps": [server]}
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    pool._environment["TF_CONFIG"] = json.dumps(config)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("gpus", "local_size", "shares"),
    [
        (0, 1, [[]]),
        (0, 3, [[], [], []]),
        (1, 1, [[0]]),
        # A scheduler shows each process one GPU, or all share it.
        (1, 2, [[0], [0]]),
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        # The same number for each: all processes have equally many replicas.
        (5, 2, [[0, 1], [2, 3]]),
    ],
)
def test_share_of_gpus_of_a_process(gpus, local_size, shares):
    assert [assigned_gpus(gpus, topology_of(i, local_size)) for i in range(local_size)] == shares


def test_fewer_gpus_than_processes():
    with pytest.raises(ValueError, match="2 GPUs for 3 processes"):
        assigned_gpus(2, topology_of(1, 3))


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ((0, None, ALONE), (["CPU:0"], "", False)),
        ((0, ["CPU:0", "CPU:1"], ALONE), (["CPU:0", "CPU:1"], "", False)),
        ((2, None, ALONE), (["GPU:0", "GPU:1"], "0,1", True)),
        ((4, None, (1, 2)), (["GPU:0", "GPU:1"], "2,3", True)),
        # As for `HorovodStrategy`.
        ((4, None, (3, 4), 1), (["GPU:0"], "3", True)),
        ((4, None, (1, 2), 1), (["GPU:0"], "2", True)),
        # Names keep their numbers.
        ((4, ["GPU:0"], ALONE), (["GPU:0"], "0", True)),
        ((4, ["/gpu:2", "/device:GPU:1"], ALONE), (["/gpu:2", "/device:GPU:1"], "0,1,2", True)),
        ((4, ["CPU:0"], ALONE), (["CPU:0"], "", False)),
    ],
)
def test_gpus_taken_by_a_process(process, arguments, result):
    (found,) = process.run(cases.taken, *arguments)
    assert found == result


def test_a_process_without_a_gpu_is_refused(process):
    (message,) = process.run(cases.taken, 2, None, (1, 3))
    assert "2 GPUs for 3 processes" in message


def test_second_strategy_takes_the_remaining_gpus(process):
    (found,) = process.run(cases.taken_twice, None, None)
    assert found == (["GPU:0", "GPU:1"], "2,3", True)
    (found,) = process.run(cases.taken_twice, ["GPU:0", "GPU:1"], ["GPU:1"])
    assert found == (["GPU:1"], "0,1", True)
    (message,) = process.run(cases.taken_twice, ["GPU:0"], ["GPU:0", "GPU:1"])
    assert "1 of 4 GPUs are visible" in message
    assert "Name all GPUs of the process in its first strategy" in message


def test_choice_of_the_program_is_kept(process):
    (found,) = process.run(cases.taken_after, "visible")
    assert found == (["GPU:0", "GPU:1"], "2,3", True)
    (found,) = process.run(cases.taken_after, "split")
    assert found == ([f"GPU:{i}" for i in range(5)], "0,1,2,3", False)


def test_nothing_is_changed_after_tensorflow_has_started(process):
    (devices,) = process.run(cases.taken_too_late)
    assert devices == ["GPU:1"]


@pytest.mark.parametrize(
    ("strategy", "result"),
    [
        ("horovod", ("0", True)),
        ("mirrored", ("0,1", True)),
        ("multi_worker", ("0,1", True)),
        ("chief", ("", False)),
    ],
)
def test_each_strategy_takes_its_gpus(process, strategy, result):
    (found,) = process.run(cases.taken_by, strategy)
    assert found == result


def test_logical_processors_stay_replicas(process):
    assert process.run(cases.logical_cpus) == [([2, 2], 1)]


def test_servers_of_parameters_have_no_gpu_and_workers_one():
    assert server_config("ps", topology_of(0, 1), 4).device_count == {"GPU": 0}
    assert server_config("worker", topology_of(0, 1), 0).device_count == {"GPU": 0}
    options = server_config("worker", topology_of(1, 2), 4).gpu_options
    assert (options.visible_device_list, options.allow_growth) == ("2", True)


def test_tfdml_launch_passes_the_local_rank():
    assert on_this_host({}) == Topology()
    found = on_this_host(local_variables(1, 4))
    assert (found.local_rank, found.local_size) == (1, 4)
    with pytest.raises(ValueError, match="`TFDML_LOCAL_SIZE` must be a non-negative integer"):
        on_this_host({"TFDML_LOCAL_RANK": "1"})
