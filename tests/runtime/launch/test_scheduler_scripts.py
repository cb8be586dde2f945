"""Checks the manifests and scripts for Kubernetes and Slurm that `tfdml launch` prints."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.runtime.launch.launched import launch


def yaml_documents(text: str) -> list:
    """Parses a manifest."""
    import yaml

    return list(yaml.safe_load_all(text))


def test_a_train_job_makes_the_same_cluster(tmp_path):
    done = launch("-n", "2", "--print-kubernetes", script="", tmp_path=tmp_path)
    runtime, job = yaml_documents(done.stdout)
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == 2
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$TF_CONFIG"; echo "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    lines = subprocess.run(
        container["command"], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    config = json.loads(lines[0])
    assert config["task"] == {"type": "worker", "index": 1}
    assert [w.split(".")[0] for w in config["cluster"]["worker"]] == [
        "tfdml-node-0-0",
        "tfdml-node-0-1",
    ]
    assert lines[1] == str(tmp_path / "program.py")


def test_an_mpi_job_runs_horovodrun(tmp_path):
    done = launch(
        "--horovod", "--hosts", "a:2,b:2", "--print-kubernetes", script="", tmp_path=tmp_path
    )
    (job,) = yaml_documents(done.stdout)
    assert job["kind"] == "MPIJob"
    assert job["spec"]["slotsPerWorker"] == 2
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"][:3] == ["horovodrun", "-np", "4"]


def slurm_bin(tmp_path: Path) -> Path:
    """Creates a directory with `scontrol`, `srun` of four tasks, and a `python` that reports."""
    directory = tmp_path / "bin"
    directory.mkdir()
    programs = {
        "scontrol": 'echo node1; echo node2',
        "srun": 'while [ "${1:0:2}" = -- ]; do shift; done\n'
        'for i in 0 1 2 3; do SLURM_PROCID=$i "$@"; done',
        "python": 'echo "$TF_CONFIG"',
        "horovodrun": 'echo "$@"',
    }  # fmt: skip
    for name, text in programs.items():
        path = directory / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return directory


def run_sbatch(text: str, directory: Path) -> str:
    """Runs an sbatch script as the first node would."""
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]"}
    return subprocess.run(
        [shutil.which("bash"), "-c", text],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_an_sbatch_script_makes_the_same_cluster(tmp_path):
    done = launch("--hosts", "a:2,b:2", "--print-slurm", script="", tmp_path=tmp_path)
    assert "#SBATCH --nodes=2" in done.stdout
    lines = run_sbatch(done.stdout, slurm_bin(tmp_path)).splitlines()
    configs = [json.loads(line) for line in lines]
    assert [c["task"]["index"] for c in configs] == [0, 1, 2, 3]
    assert configs[3]["cluster"]["worker"] == [
        "node1:29400",
        "node1:29401",
        "node2:29400",
        "node2:29401",
    ]


def test_an_sbatch_script_for_horovod(tmp_path):
    done = launch("--horovod", "--hosts", "a:2,b:2", "--print-slurm", script="", tmp_path=tmp_path)
    output = run_sbatch(done.stdout, slurm_bin(tmp_path))
    assert output.startswith("-np 4 -H node1:2,node2:2 python")
