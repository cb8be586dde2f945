"""Scheduler files for a launched job: an sbatch script, and manifests for Kubernetes.

They are printed for the user to review and edit. The tests run the shell code that sets TF_CONFIG.
The sbatch script of workers has run in full on Slurm 22.05; the manifests are untested on
Kubernetes.
"""

import json
import shlex
from collections.abc import Sequence

from tfdml.runtime.launch.job_hosts import Host

# Port of a machine's first worker; its other workers use the ports after it.
PORT = 29400


def layout(hosts: Sequence[Host], by_node: bool) -> tuple[int, int]:
    """Returns the number of nodes, and of ranks on each.

    Args:
        hosts: Hosts and their numbers of ranks.
        by_node: Whether several ranks share a node. Otherwise each rank of one host is a pod.

    Raises:
        ValueError: If the hosts have different numbers of ranks.
    """
    ranks = {host.ranks for host in hosts}
    if len(ranks) != 1:
        raise ValueError(
            f"`hosts` must each have the same number of ranks for a scheduler. Received: "
            f"{sorted(ranks)}."
        )
    (each,) = ranks
    return (each, 1) if len(hosts) == 1 and not by_node else (len(hosts), each)


def slurm(nodes: int, ranks_per_node: int, program: Sequence[str], horovod: bool) -> str:
    """Returns an sbatch script.

    Args:
        nodes: Number of machines.
        ranks_per_node: Number of ranks on each machine.
        program: Script and its arguments.
        horovod: Whether `horovodrun` starts the ranks; otherwise each gets a TF_CONFIG.
    """
    command = shlex.join(["python", *program])
    head = f"""#!/bin/bash
#SBATCH --job-name=tfdml
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={1 if horovod else ranks_per_node}
#SBATCH --cpus-per-task=8   # Change to what a rank needs;
##SBATCH --gpus-per-task=1  # with GPUs, remove one of the two #.
#SBATCH --time=24:00:00
set -euo pipefail
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""
    if horovod:
        return f"""{head}
# horovodrun reaches the nodes by ssh, from the first one.
exec horovodrun -np {nodes * ranks_per_node} \\
    -H "$(printf '%s:{ranks_per_node},' $hosts | sed 's/,$//')" {command}
"""
    return f"""{head}
workers=""
for host in $hosts; do
    for local_rank in $(seq 0 {ranks_per_node - 1}); do
        workers="$workers,\\"$host:$(({PORT} + local_rank))\\""
    done
done
export TFDML_WORKERS="${{workers#,}}"
# One rank that fails ends the job.
srun --distribution=block --kill-on-bad-exit=1 bash -c '
    task="{{\\"type\\": \\"worker\\", \\"index\\": $SLURM_PROCID}}"
    export TF_CONFIG="{{\\"cluster\\": {{\\"worker\\": [$TFDML_WORKERS]}}, \\"task\\": $task}}"
    exec "$@"' bash {command}
"""


def kubernetes(nodes: int, ranks_per_node: int, program: Sequence[str], horovod: bool) -> str:
    """Returns a manifest: an MPIJob for Horovod, otherwise a TrainJob with its TrainingRuntime.

    Args:
        nodes: Number of pods.
        ranks_per_node: Number of ranks in each pod; 1 without Horovod.
        program: Script and its arguments.
        horovod: Whether `horovodrun` starts the ranks.

    Raises:
        ValueError: If a pod would run several workers of a TensorFlow cluster.
    """
    if horovod:
        return _mpi_job(nodes, ranks_per_node, program)
    if ranks_per_node != 1:
        raise ValueError(
            f"`hosts` must have one rank each for a TrainJob: a worker uses all GPUs of its pod. "
            f"Received: {ranks_per_node} ranks per host. Use node1:1,node2:1, or `--horovod`."
        )
    return _train_job(nodes, program)


def _mpi_job(nodes: int, ranks_per_node: int, program: Sequence[str]) -> str:
    size = nodes * ranks_per_node
    command = ["horovodrun", "-np", str(size), "--hostfile", "/etc/mpi/hostfile"]
    return f"""# Needs the MPI operator, and an image with Horovod, tfdml, sshd and the script.
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: tfdml
spec:
  slotsPerWorker: {ranks_per_node}
  runPolicy:
    cleanPodPolicy: Running
    backoffLimit: 3
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      template:
        spec:
          containers:
            - name: launcher
              image: CHANGE-ME
              command: {json.dumps([*command, "python", *program])}
    Worker:
      replicas: {nodes}
      template:
        spec:
          containers:
            - name: worker
              image: CHANGE-ME
              command: ["/usr/sbin/sshd", "-De"]
              resources:
                limits:
                  nvidia.com/gpu: {ranks_per_node}  # Leave out without GPUs.
"""


def _train_job(nodes: int, program: Sequence[str]) -> str:
    script = f"""
workers=""
for i in $(seq 0 {nodes - 1}); do
  workers="$workers,\\"tfdml-node-0-$i.tfdml:{PORT}\\""
done
task="{{\\"type\\": \\"worker\\", \\"index\\": $JOB_COMPLETION_INDEX}}"
export TF_CONFIG="{{\\"cluster\\": {{\\"worker\\": [${{workers#,}}]}}, \\"task\\": $task}}"
exec {shlex.join(["python", *program])}
"""
    indented = "\n".join(" " * 24 + line if line else "" for line in script.strip().splitlines())
    return f"""# Needs Kubeflow Trainer, and an image with TensorFlow, tfdml and the script.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: tfdml-multi-worker
spec:
  mlPolicy:
    numNodes: {nodes}
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              template:
                spec:
                  containers:
                    - name: node
                      image: CHANGE-ME
                      command:
                      - bash
                      - -c
                      - |
{indented}
                      resources:
                        limits:
                          nvidia.com/gpu: 1  # Leave out without GPUs.
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: tfdml
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: tfdml-multi-worker
  trainer:
    numNodes: {nodes}
"""
