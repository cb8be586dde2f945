"""Kubernetes manifests for a job's ranks: an MPIJob for Horovod, otherwise a TrainJob.

The MPIJob is printed for the user to review and edit, and has not run on a cluster.
"""

import json
from collections.abc import Sequence

from tfdml.runtime.launch import train_jobs


def ranks(nodes: int, ranks_per_node: int, program: Sequence[str], horovod: bool) -> str:
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
    return train_jobs.multi_worker(nodes, program)


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
