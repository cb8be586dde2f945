"""Checks that missing ranks and occupied ports are named, and that nobody waits forever."""

import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdml.horovod_build import child
from tfdml.runtime.launch.supervisor import free_ports
from tfdml.runtime.rendezvous import wait_for_peers
from tfdml.topology import child_environment

PROGRAM = "import tfdml; tfdml.MultiWorkerMirroredStrategy(start_limit=4.0); print('started')"


def start(rank: int, ports: list[int]) -> child.ChildResult:
    """Runs one worker of a cluster on these ports to its end."""
    workers = [f"127.0.0.1:{port}" for port in ports]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    environment = child_environment(TF_CONFIG=json.dumps(config), TF_CPP_MIN_LOG_LEVEL="2")
    return child.run([sys.executable, "-c", PROGRAM], environment=environment, timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_named(rank):
    ports = free_ports(2)
    ended = start(rank, ports)
    assert (ended.returncode, ended.timed_out) == (1, False), ended.output
    reason = f"rank {1 - rank} at 127.0.0.1:{ports[1 - rank]}: [Errno 111] Connection refused"
    assert reason in ended.output
    assert f"Received on rank {rank}: no answer from rank {1 - rank}" in ended.output


def test_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = start(0, [port, *free_ports(1)])
    assert (ended.returncode, ended.timed_out) == (1, False), ended.output
    assert f"Received on rank 0: 127.0.0.1:{port}, Address already in use" in ended.output


@pytest.mark.slow
def test_server_that_waits_forever_is_ended():
    """A server listens in place of the other rank, but is not a TensorFlow worker."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = start(0, [*free_ports(1), other.getsockname()[1]])
    assert (ended.returncode, ended.timed_out) == (1, False), ended.output
    assert "Timeout (0:00:04)!" in ended.output


def test_all_ranks_find_each_other():
    """They start at different times, and their ports are free again afterwards."""
    ports = free_ports(3)
    addresses = [f"127.0.0.1:{port}" for port in ports]

    def come(rank: int) -> None:
        time.sleep(0.3 * rank)
        wait_for_peers(addresses, rank, 10.0)
        # TensorFlow's server listens there from now on.
        servers.append(socket.create_server(("", ports[rank])))

    servers: list[socket.socket] = []
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(come, range(3)))
    assert len(servers) == 3
    for server in servers:
        server.close()
