"""Checks the scripts for Slurm that `tfdml launch` prints, by running them without Slurm."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.runtime.launch.launched import launch

PROGRAMS = {
    "scontrol": 'if [ "$1" = requeue ]; then echo "requeued $2"; else echo node1; echo node2; fi',
    # Four tasks, two on each node.
    "srun": """
while [ "${1:0:2}" = -- ]; do shift; done
for i in 0 1 2 3; do
    export SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) SLURM_NODEID=$((i / 2)) SLURM_NTASKS=4
    SLURMD_NODENAME=node$((i / 2)) "$@" || code=$?
done
exit ${code:-0}""",
    # A rank that shows its variables; or what starts Horovod's ranks.
    "python": """
if [ "$1" = -m ]; then echo "hosts $3"; shift 3; exec "$@"; fi
echo ${TF_CONFIG:-$(env | grep ^HOROVOD_ | sort)}
exit ${CODE_OF_RANKS:-0}""",
}


def run_sbatch(text: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess:
    """Runs an sbatch script as the first node would, with programs that report."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, program in PROGRAMS.items():
        path = directory / name
        path.write_text(f"#!/bin/bash\n{program}\n")
        path.chmod(0o755)
    variables["PATH"] = f"{directory}:{os.environ['PATH']}"
    variables |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        [shutil.which("bash"), "-c", text], env=variables, capture_output=True, text=True
    )


def test_an_sbatch_script_makes_the_same_cluster(tmp_path):
    done = launch("--hosts", "a:2,b:2", "--print-slurm", script="", tmp_path=tmp_path)
    assert "#SBATCH --nodes=2" in done.stdout
    assert "#SBATCH --ntasks-per-node=2" in done.stdout
    lines = run_sbatch(done.stdout, tmp_path).stdout.splitlines()
    configs = [json.loads(line) for line in lines if line.startswith("{")]
    assert [c["task"]["index"] for c in configs] == [0, 1, 2, 3]
    assert configs[3]["cluster"]["worker"] == [
        "node1:29400",
        "node1:29401",
        "node2:29400",
        "node2:29401",
    ]


def test_an_sbatch_script_for_horovod(tmp_path):
    done = launch("--horovod", "--hosts", "a:2,b:2", "--print-slurm", script="", tmp_path=tmp_path)
    hosts, *ranks = run_sbatch(done.stdout, tmp_path).stdout.splitlines()
    assert hosts == "hosts node1:2,node2:2,"
    assert ranks[2] == (
        "HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2 HOROVOD_HOSTNAME=node1 HOROVOD_LOCAL_RANK=0 "
        "HOROVOD_LOCAL_SIZE=2 HOROVOD_RANK=2 HOROVOD_SIZE=4"
    )
    assert len(ranks) == 4


@pytest.mark.parametrize("option", [(), ("--horovod",)])
@pytest.mark.parametrize(("code", "requeues"), [("75", True), ("1", False)])
def test_a_job_that_has_saved_itself_is_requeued(tmp_path, option, code, requeues):
    done = launch(*option, "--hosts", "a:2,b:2", "--print-slurm", script="", tmp_path=tmp_path)
    ended = run_sbatch(done.stdout, tmp_path, CODE_OF_RANKS=code)
    assert ended.returncode == int(code)
    assert ("requeued 7" in ended.stdout) == requeues
