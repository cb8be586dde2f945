"""Checks jobs on two machines by ssh: a real sshd on two hosts of a network lab."""

import json
import sys

import pytest

from tests.harness.ssh_lab import run_on_hosts
from tests.runtime.faults.jobs import PROGRAM
from tfdml.topology import child_environment

pytestmark = pytest.mark.slow

# Runs the job, then counts its remaining processes. The job is not among this script's
# arguments, by which processes are found.
JOB = """
import json, os, subprocess, time
from pathlib import Path
from tests.runtime.faults.jobs import left_of
directory, kills, command = json.loads(os.environ["TFDML_TEST_JOB"])
launcher = subprocess.Popen(command)
if kills:
    while not list(Path(directory).glob("fault*")):
        time.sleep(0.1)
    launcher.kill()
code = launcher.wait(150)
deadline = time.monotonic() + 20
while left_of(directory) and time.monotonic() < deadline:
    time.sleep(0.2)
print("CODE", code, "LEFT", len(left_of(directory)), flush=True)
"""


@pytest.fixture
def lab(tmp_path):
    """Returns a function that runs a job on two hosts connected by ssh and returns its output."""
    job = tmp_path / "job"
    job.mkdir()

    def run(kind: str, *program: object, kills: bool = False) -> str:
        launch = [sys.executable, "-m", "tfdml.cli.main", "launch", "--hosts", "host0:1,host1:1"]
        if kind == "horovod":
            launch.append("--horovod")
        launch += [str(PROGRAM), str(job), kind, *map(str, program)]
        environment = child_environment(TFDML_TEST_JOB=json.dumps([str(job), kills, launch]))
        return run_on_hosts(tmp_path, 2, [sys.executable, "-c", JOB], environment).output

    return run


KINDS = pytest.mark.parametrize("kind", ["horovod", "multi_worker"])


@KINDS
def test_a_job_on_two_machines(lab, kind):
    output = lab(kind, "nothing", "nowhere", 0)
    assert "CODE 0 LEFT 0" in output, output
    assert output.count("done") == 2, output


@KINDS
def test_a_rank_on_the_other_machine_is_killed(lab, kind):
    output = lab(kind, "SIGKILL", "batch_end", 1)
    assert "rank 1" in output, output
    assert "host1" in output, output
    assert "LEFT 0" in output, output
    assert "CODE 0" not in output


@KINDS
def test_the_launcher_is_killed(lab, kind):
    """A hanging rank notices nothing; its machine ends it nevertheless."""
    output = lab(kind, "SIGSTOP", "batch_end", 1, kills=True)
    assert "CODE -9 LEFT 0" in output, output
