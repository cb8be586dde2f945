"""Checks printed sbatch scripts on a real Slurm of two nodes: training, preemption, discovery."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.harness.slurm_lab import run_on_slurm
from tests.strategies.parameter_server.test_job import TRAIN
from tfdml.runtime.launch import slurm_scripts
from tfdml.topology import child_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
RESUMING = Path(__file__).with_name("resuming_program.py")


def on_slurm(tmp_path: Path, shell: str) -> str:
    """Runs a shell script on the first node; returns its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = child_environment(PATH=path, PYTHONPATH=str(ROOT))
    return run_on_slurm(tmp_path, ["bash", "-euc", shell], environment).output


# Waits for the job's end, and shows what Slurm says of it.
WAIT = """
until [ -z "$(squeue -h -j $job 2>&1)" ]; do sleep 0.5; done
scontrol show job $job | grep -o "Restarts=[0-9]*\\|JobState=[A-Z]*"
"""

# Submits a job, undisturbed or preempted once by a job of the other partition.
TRAINS = """
cd DIRECTORY
sbatch -o undisturbed.log --wait undisturbed.sh
job=$(sbatch --parsable -o preempted.log preempted.sh)
until [ -e preempted/waits ]; do sleep 0.2; done
sbatch --partition=high --nodes=2 --exclusive -o other.log --wait --wrap "echo another job"
until grep -q "another job" other.log; do sleep 0.2; done
WAIT
cat undisturbed.log preempted.log
"""


@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_a_preempted_job_is_requeued_and_ends_with_the_same_bits(tmp_path, kind):
    for name in ("undisturbed", "preempted"):
        (tmp_path / name).mkdir()
        program = [str(RESUMING), str(tmp_path / name), kind, *["waits"][: name == "preempted"]]
        text = slurm_scripts.ranks(2, 1, program, kind == "horovod")
        (tmp_path / f"{name}.sh").write_text(text)
    output = on_slurm(tmp_path, TRAINS.replace("DIRECTORY", str(tmp_path)).replace("WAIT", WAIT))
    undisturbed, preempted = re.findall(r"WEIGHTS (\w+) on 2", output)
    assert undisturbed == preempted
    assert "Restarts=1" in output, output
    assert "JobState=COMPLETED" in output, output
    assert "tfdml: preempted, saved after step" in output, output


# A rank that exits as one does that has saved itself; started again, it ends well.
ASKED_TO_END = """
import os, signal, sys, time
def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else 300)
"""


def test_a_job_near_its_time_limit_is_requeued(tmp_path):
    (tmp_path / "rank.py").write_text(ASKED_TO_END)
    text = slurm_scripts.ranks(2, 1, ["rank.py"], horovod=False)
    # Slurm's unit is the minute: after one the signal, after two the end.
    text = text.replace("--time=24:00:00", "--time=2").replace("TERM@120", "TERM@60")
    (tmp_path / "job.sh").write_text(text)
    output = on_slurm(tmp_path, f"cd {tmp_path}; job=$(sbatch --parsable job.sh); {WAIT}")
    assert "Restarts=1" in output, output
    assert "JobState=COMPLETED" in output, output


def test_a_job_with_parameter_servers(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    text = slurm_scripts.parameter_servers(1, 1, [str(tmp_path / "train.py")])
    (tmp_path / "job.sh").write_text(text)
    shell = "sbatch --wait --nodes=2 --ntasks-per-node=2 -o job.log job.sh || true; cat job.log"
    output = on_slurm(tmp_path, f"cd {tmp_path}; {shell}")
    assert "iterations 10" in output, output
    assert output.count("ends, because the chief is done.") == 2, output


# Runs as a job: takes a node away, and shows before and after it what hosts.sh prints.
DISCOVERS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4 --no-kill
echo both: $(./hosts.sh)
scontrol update NodeName=host1 State=down Reason=test
for i in {1..50}; do [ "$(./hosts.sh | wc -l)" = 2 ] || break; sleep 0.2; done
echo left: $(./hosts.sh)
"""


def test_discovery_finds_the_nodes_that_the_job_has_now(tmp_path):
    (script,) = [b.text for b in blocks(ROOT / "docs" / "slurm.md") if b.text.startswith("#!")]
    (tmp_path / "hosts.sh").write_text(script)
    (tmp_path / "hosts.sh").chmod(0o755)
    (tmp_path / "job.sh").write_text(DISCOVERS)
    output = on_slurm(tmp_path, f"cd {tmp_path}; sbatch --wait -o job.log job.sh; cat job.log")
    assert "both: host0:4 host1:4" in output, output
    assert "left: host0:4\n" in output, output
