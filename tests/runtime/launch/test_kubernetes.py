"""Checks the manifests for Kubernetes that `tfdml launch` prints, and runs their pods' commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import blocks
from tests.harness.side_environment import kubeflow_python
from tests.strategies.parameter_server.test_job import TRAIN
from tests.strategies.start import test_resolvers
from tfdml.runtime.launch import kubernetes_manifests, train_jobs
from tfdml.runtime.servers.server_task import checked_task
from tfdml.topology import child_environment

ROOT = Path(__file__).resolve().parents[3]
MANIFESTS = {
    "workers": train_jobs.multi_worker(2, ["train.py", "--x"]),
    "servers": train_jobs.parameter_servers(2, 3, ["train.py", "--x"]),
}
EACH = pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)


def commands(text: str) -> dict[str, list[str]]:
    """Returns the command of each replicated job's pods."""
    runtime, _ = yaml.safe_load_all(text)
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
        for job in jobs
    }


def start_pod(tmp_path: Path, command: list[str], **environment: str) -> tuple[dict, str]:
    """Runs a pod's command with programs that report; returns TF_CONFIG and what it starts."""
    for name in ("python", "tfdml"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "$TF_CONFIG"; echo "{name} $@"\n')
        (tmp_path / name).chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    config, started = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return json.loads(config), started


def test_names_and_number_of_workers_come_from_the_pod(tmp_path):
    (command,) = commands(MANIFESTS["workers"]).values()
    config, started = start_pod(tmp_path, command, HOSTNAME="run-7-node-0-2", PET_NNODES="3")
    workers = [f"run-7-node-0-{i}.run-7:29400" for i in range(3)]
    assert config["cluster"] == {"worker": workers}
    assert config["task"] == {"type": "worker", "index": 2}
    assert started == "python train.py --x"
    config, _ = start_pod(tmp_path, command, HOSTNAME="other-node-0-1")
    assert config["cluster"] == {"worker": [f"other-node-0-{i}.other:29400" for i in range(2)]}


@pytest.mark.parametrize(
    ("host", "name", "program"),
    [
        ("run-chief-0-0", "the chief", "python train.py --x"),
        ("run-ps-0-1", "parameter server 1", "tfdml serve"),
        ("run-worker-0-3", "worker 3", "tfdml serve"),
    ],
)
def test_pods_with_parameter_servers_make_the_same_cluster(tmp_path, host, name, program):
    command = commands(MANIFESTS["servers"])[host.split("-")[1]]
    config, started = start_pod(tmp_path, command, HOSTNAME=host, PET_NNODES="4")
    cluster = config["cluster"]
    assert {role: len(addresses) for role, addresses in cluster.items()} == {
        "chief": 1,
        "ps": 3,
        "worker": 4,
    }
    task = checked_task(cluster, config["task"]["type"], config["task"]["index"])
    assert (task.name, task.address, started) == (name, f"{host}.run:29400", program)


@EACH
def test_a_runtime_and_the_job_that_refers_to_it(text):
    runtime, job = yaml.safe_load_all(text)
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert runtime["metadata"]["labels"] == {"trainer.kubeflow.org/framework": "tensorflow"}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == 2
    # Kubeflow Trainer finds the pods that `numNodes` is about by these two.
    trainers = [
        each["template"]["spec"]["template"]["spec"]["containers"][0]["name"]
        for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]
        if each["template"].get("metadata", {}).get("labels")
        == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    ]
    assert trainers == ["node"]


@EACH
def test_preemptions_restart_all_pods_without_counting(text):
    runtime, _ = yaml.safe_load_all(text)
    job_set = runtime["spec"]["template"]["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 3
    (rule,) = job_set["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    script_job = job_set["replicatedJobs"][0]["template"]["spec"]
    preempted, evicted = script_job["podFailurePolicy"]["rules"]
    assert preempted["onExitCodes"]["values"] == [75]
    (container,) = script_job["template"]["spec"]["containers"]
    assert preempted["onExitCodes"]["containerName"] == container["name"]
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # Kubernetes allows a pod failure policy with this restart policy alone.
    assert script_job["template"]["spec"]["restartPolicy"] == "Never"


# The models drop fields that they do not know.
KEEPS_ALL_FIELDS = """
import json, sys
from kubeflow_trainer_api import models
for document in json.load(sys.stdin):
    model = getattr(models, "TrainerV1alpha1" + document["kind"])
    assert model.from_dict(document).to_dict() == document, document["kind"]
    print("kept", document["kind"])
"""


@pytest.mark.slow
@EACH
def test_the_official_models_accept_each_field(text):
    documents = json.dumps(list(yaml.safe_load_all(text)))
    done = subprocess.run(
        [kubeflow_python(), "-c", KEEPS_ALL_FIELDS], input=documents, capture_output=True, text=True
    )
    assert done.stdout == "kept TrainingRuntime\nkept TrainJob\n", done.stderr


def test_an_mpi_job_runs_horovodrun():
    job = yaml.safe_load(kubernetes_manifests.ranks(2, 2, ["train.py"], horovod=True))
    assert job["kind"] == "MPIJob"
    assert job["spec"]["slotsPerWorker"] == 2
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"][:3] == ["horovodrun", "-np", "4"]


# Makes a host of the lab the pod of its number, and runs the pod's command there.
POD = """
pods=($PODS)
names=$SCRATCH/names$NETLAB_HOST
for i in ${!pods[@]}; do echo "10.77.0.$((i + 1)) ${pods[i]}.run ${pods[i]}"; done > $names
mount --bind $names /etc/hosts
export HOSTNAME=${pods[NETLAB_HOST]}
hostname $HOSTNAME
job=${HOSTNAME#run-}
exec bash -c "$(cat $SCRATCH/${job%-0-*})"
"""


def start_pods(tmp_path: Path, pods: list[str], text: str) -> subprocess.Popen:
    """Starts the pods of a job named "run", each on a host of a lab."""
    for name, command in commands(text).items():
        assert command[:2] == ["bash", "-c"]
        (tmp_path / name).write_text(command[2])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PODS": " ".join(pods), "SCRATCH": str(tmp_path), "PET_NNODES": "2"}
    hosts = [ROOT / "tools" / "netlab", "--hosts", str(len(pods)), "--"]
    return subprocess.Popen(
        [*hosts, "timeout", str(test_resolvers.LIMIT), "bash", "-c", POD],
        env=child_environment(PATH=path, PYTHONPATH=str(ROOT), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_pods_of_workers_train_as_one_process(tmp_path):
    text = train_jobs.multi_worker(5, [str(test_resolvers.PROGRAM), str(tmp_path), "pods"])
    lab = start_pods(tmp_path, ["run-node-0-0", "run-node-0-1"], text)
    test_resolvers.check(tmp_path, "pods", [lab])


@pytest.mark.slow
def test_pods_with_parameter_servers_train(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    text = train_jobs.parameter_servers(5, 1, [str(tmp_path / "train.py")])
    pods = ["run-chief-0-0", "run-ps-0-0", "run-worker-0-0", "run-worker-0-1"]
    lab = start_pods(tmp_path, pods, text)
    output, _ = lab.communicate()
    assert lab.returncode == 0, output
    assert "iterations 10" in output
    assert output.count("ends, because the chief is done.") == 3


# In the view of one host of a lab, where a file takes the place of the cluster's name service.
DISCOVERS = """
mount --bind $SCRATCH/names /etc/hosts
for known in "0 1 2" "0 2"; do
    for i in $known; do echo "10.77.0.1$i run-node-0-$i.run"; done > $SCRATCH/names
    echo found: $(bash $SCRATCH/hosts.sh)
done
"""


@pytest.mark.slow
def test_discovery_finds_the_pods_that_have_an_address(tmp_path):
    (script,) = [b.text for b in blocks(ROOT / "docs" / "kubernetes.md") if b.text.startswith("#!")]
    (tmp_path / "hosts.sh").write_text(script)
    (tmp_path / "names").touch()
    done = subprocess.run(
        [ROOT / "tools" / "netlab", "--hosts", "1", "--", "bash", "-euc", DISCOVERS],
        env=child_environment(HOSTNAME="run-node-0-0", PET_NNODES="3", SCRATCH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        "found: run-node-0-0.run:1 run-node-0-1.run:1 run-node-0-2.run:1",
        "found: run-node-0-0.run:1 run-node-0-2.run:1",
    ], done.stderr
