"""Checks jobs on several machines by ssh: a real sshd on each host of a network lab."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.harness.ssh_lab import run_on_hosts
from tests.runtime.faults.jobs import PROGRAM
from tfdml.topology import child_environment

pytestmark = pytest.mark.slow

RESUMING = Path(__file__).with_name("resuming_program.py")

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


# Runs jobs one after the other. When a program has created DIRECTORY/waits, everything on host1 is
# killed, sshd too, but for the script that keeps the host in the lab.
DEATH = """
import json, os, subprocess, time
from pathlib import Path
import psutil
def end(pid):
    if psutil.pid_exists(pid) and not {"ssh_host.sh", "sleep"} & {psutil.Process(pid).name()}:
        psutil.Process(pid).kill()
for directory, command in json.loads(os.environ["TFDML_TEST_JOBS"]):
    launcher = subprocess.Popen(command)
    while launcher.poll() is None:
        time.sleep(0.1)
        if Path(directory, "waits").exists():
            pids = subprocess.run(["ip", "netns", "pids", "host1"], capture_output=True, text=True)
            for pid in pids.stdout.split():
                end(int(pid))
    print("CODE", launcher.returncode, flush=True)
"""


@KINDS
def test_a_spare_takes_the_place_of_a_host_that_dies(tmp_path, kind):
    launch = [sys.executable, "-m", "tfdml.cli.main", "launch", "--max-restarts", "1"]
    launch += ["--hosts", "host0,host1", "--spares", "host2"]
    launch += ["--horovod"] if kind == "horovod" else []
    jobs = []
    for waits in ("", "waits"):
        directory = tmp_path / f"job_{waits}"
        directory.mkdir()
        jobs.append([str(directory), [*launch, str(RESUMING), str(directory), kind, waits]])
    environment = child_environment(TFDML_TEST_JOBS=json.dumps(jobs))
    command = [sys.executable, "-c", DEATH]
    output = run_on_hosts(tmp_path, 3, command, environment, timeout=400).output
    assert output.count("CODE 0") == 2, output
    assert "host2 takes the place of host1, which does not answer." in output, output
    assert "restart 1 of 1, on host0:1, host2:1." in output, output
    undisturbed, replaced = re.findall(r"WEIGHTS (\w+) on 2", output)
    assert undisturbed == replaced
