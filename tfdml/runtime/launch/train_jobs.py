"""Kubernetes manifests for Kubeflow Trainer: a TrainJob with its TrainingRuntime.

They are printed for the user to review and edit. The tests hold them against the official models
of Kubeflow Trainer 2.3, and run the pods' commands on hosts of a network lab; the manifests have
not run on a cluster.
"""

import dataclasses
import shlex
import textwrap
from collections.abc import Mapping, Sequence

from tfdml.runtime.immediate_exit import PREEMPTED_EXIT_CODE
from tfdml.runtime.launch.slurm_scripts import PORT

# For each role of a cluster the replicated job of its pods, and their number in shell.
_Cluster = Mapping[str, tuple[str, str]]


def multi_worker(workers: int, program: Sequence[str]) -> str:
    """Returns the manifest of a TrainJob whose pods are the workers of one cluster.

    Args:
        workers: Number of workers.
        program: Script and its arguments.
    """
    cluster = {"worker": ("node", _number(workers))}
    command = _command("worker", cluster, ["python", *program])
    pods = [_Pods("node", "node", None, True, command)]
    return _manifest("tfdml-multi-worker", workers, pods, " {}")


def parameter_servers(workers: int, servers: int, program: Sequence[str]) -> str:
    """Returns the manifest of a TrainJob whose pods are a chief, servers and workers.

    Args:
        workers: Number of workers.
        servers: Number of parameter servers.
        program: Script and its arguments, which the chief runs.
    """
    cluster = {
        "chief": ("chief", "1"),
        "ps": ("ps", str(servers)),
        "worker": ("worker", _number(workers)),
    }
    serve = ["tfdml", "serve"]
    pods = [
        _Pods("chief", "chief", 1, True, _command("chief", cluster, ["python", *program])),
        _Pods("ps", "ps", servers, False, _command("ps", cluster, serve)),
        _Pods("worker", "node", None, False, _command("worker", cluster, serve)),
    ]
    # Pods of other jobs than that of `numNodes` get the number of nodes only by request.
    torch = """
      envInjection:
        targets:
          - jobName: chief
            containerNames: [chief]
          - jobName: ps
            containerNames: [ps]"""
    success = """
      successPolicy:
        operator: All
        targetReplicatedJobs: [chief]"""
    return _manifest("tfdml-parameter-servers", workers, pods, torch, success)


def _number(nodes: int) -> str:
    """Returns the number of a TrainJob's nodes in shell; `nodes` if the TrainJob has none."""
    return f"${{PET_NNODES:-{nodes}}}"


def _command(role: str, cluster: _Cluster, command: Sequence[str]) -> str:
    """Returns the shell command of a role's pods, which sets TF_CONFIG by the pod's host name."""
    job = cluster[role][0]
    addresses = ", ".join(
        f'\\"{name}\\": [$(addresses {pods_job} {pods})]'
        for name, (pods_job, pods) in cluster.items()
    )
    return f"""# This pod is JOB-{job}-0-INDEX in the domain JOB, the TrainJob's name.
job=${{HOSTNAME%-{job}-0-*}}
addresses() {{ seq -f "\\"$job-$1-0-%g.$job:{PORT}\\"" -s , 0 $(($2 - 1)); }}
task="{{\\"type\\": \\"{role}\\", \\"index\\": ${{HOSTNAME##*-}}}}"
export TF_CONFIG="{{\\"cluster\\": {{{addresses}}}, \\"task\\": $task}}"
exec {shlex.join(command)}"""


@dataclasses.dataclass(frozen=True)
class _Pods:
    """Pods of one role.

    Attributes:
        job: Name of their replicated job.
        container: Name of their container; "node" where `number` is None.
        number: Number of pods; None for the TrainJob's `numNodes`.
        together: Whether a pod that fails makes all pods start again, not itself alone.
        command: Shell command.
    """

    job: str
    container: str
    number: int | None
    together: bool
    command: str

    def manifest(self) -> str:
        """Returns the replicated job."""
        if self.number is None:
            head = """
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:"""
            resources = """
                      resources:
                        limits:
                          nvidia.com/gpu: 1  # Leave out without GPUs."""
        else:
            head = f"""
            spec:
              completions: {self.number}
              parallelism: {self.number}"""
            resources = ""
        return f"""
        - name: {self.job}
          template:{head}{self._restarts()}
                  containers:
                    - name: {self.container}
                      image: CHANGE-ME
                      command:
                      - bash
                      - -c
                      - |
{textwrap.indent(self.command, " " * 24)}{resources}"""

    def _restarts(self) -> str:
        if not self.together:
            return """
              backoffLimit: 20
              template:
                spec:
                  restartPolicy: OnFailure"""
        return f"""
              backoffLimit: 0  # A pod that fails makes all pods start again.
              podFailurePolicy:
                rules:
                  - action: FailJob  # All ranks have saved and ended, before a preemption.
                    onExitCodes:
                      containerName: {self.container}
                      operator: In
                      values: [{PREEMPTED_EXIT_CODE}]
                  - action: FailJob  # The pod was evicted, or its node is gone.
                    onPodConditions:
                      - type: DisruptionTarget
                        status: "True"
              template:
                spec:
                  restartPolicy: Never
                  terminationGracePeriodSeconds: 120  # To save, from SIGTERM on."""


def _manifest(
    runtime: str, nodes: int, pods: Sequence[_Pods], torch: str, success: str = ""
) -> str:
    return f"""# Needs Kubeflow Trainer 2.3, and an image with TensorFlow, tfdml and the script.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {runtime}
  labels:
    trainer.kubeflow.org/framework: tensorflow
spec:
  mlPolicy:
    numNodes: {nodes}
    # Gives pods the number of nodes, in PET_NNODES. There is no policy for TensorFlow.
    torch:{torch}
  template:
    spec:{success}
      failurePolicy:
        maxRestarts: 3
        rules:
          - name: preempted  # Restarts after preemptions are not counted.
            action: RestartJobSetAndIgnoreMaxRestarts
            onJobFailureReasons: [PodFailurePolicy]
      replicatedJobs:{"".join(each.manifest() for each in pods)}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: tfdml
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {runtime}
  trainer:
    numNodes: {nodes}
"""
