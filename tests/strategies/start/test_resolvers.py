"""Checks that real workers described by any resolver train as one process does."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfdml.runtime.launch.supervisor import free_ports
from tfdml.topology import child_environment

PROGRAM = Path(__file__).with_name("resolver_program.py")
ROOT = PROGRAM.parents[2]
LIMIT = 120  # Seconds.


def start(tmp_path: Path, *arguments: object, **environment: str) -> subprocess.Popen:
    """Starts a worker with a time limit."""
    command = ["timeout", "-k", "5", str(LIMIT), sys.executable, str(PROGRAM), str(tmp_path)]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=child_environment(PYTHONPATH=str(ROOT), **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(tmp_path: Path, name: str) -> list[np.ndarray]:
    """Returns the weights that a worker saved."""
    with np.load(tmp_path / f"{name}.npz") as file:
        return [file[key] for key in file.files]


def check(tmp_path: Path, kind: str, workers: list[subprocess.Popen]) -> None:
    """Waits for the processes of two workers; their weights must equal those of one process."""
    alone = start(tmp_path, "none")
    for worker in [*workers, alone]:
        output, _ = worker.communicate()
        assert worker.returncode == 0, output
    one = weights(tmp_path, "none_0_of_1")
    for rank in range(2):
        found = weights(tmp_path, f"{kind}_{rank}_of_2")
        for a, b in zip(found, one, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_simple(tmp_path):
    addresses = [f"localhost:{port}" for port in free_ports(2)]
    check(tmp_path, "simple", [start(tmp_path, "simple", i, *addresses) for i in range(2)])


def two_ports_in_a_row() -> int:
    """Returns the first of two adjacent free ports, as Slurm's tasks on a node use."""
    for port in free_ports(20):
        with contextlib.suppress(OSError), socket.create_server(("", port + 1)):
            return port
    pytest.fail("no two neighbouring ports are free")


@pytest.mark.slow
def test_slurm(tmp_path):
    """The variables are those that `srun -n 2` sets on one node; see Slurm's manual of srun."""
    environment = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    port = two_ports_in_a_row()
    workers = [start(tmp_path, "slurm", port, SLURM_PROCID=str(i), **environment) for i in range(2)]
    check(tmp_path, "slurm", workers)


@pytest.mark.slow
def test_kubernetes(tmp_path):
    """Kubernetes's own client asks an API server for the pods, which are hosts of a lab.

    TensorFlow's workers all use one port there, so each must be on its own machine.
    """
    lab = subprocess.Popen(
        [ROOT / "tools" / "netlab", "--hosts", "2", "--", "timeout", str(LIMIT), sys.executable]
        + ["-m", "tests.strategies.start.kubernetes_host", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    check(tmp_path, "kubernetes", [lab])
