"""Scheduler files for a job with parameter servers: an sbatch script, and a Kubernetes TFJob.

They are printed for the user to review and edit. The tests run the shell code; the files as a
whole are untested on Slurm and Kubernetes.
"""

import json
import shlex
from collections.abc import Sequence

from tfdml.runtime.launch.scheduler_scripts import PORT


def slurm(workers: int, servers: int, program: Sequence[str]) -> str:
    """Returns an sbatch script with one task each for the chief, the servers and the workers.

    Args:
        workers: The number of workers.
        servers: The number of parameter servers.
        program: The script and its arguments.
    """
    return f"""#!/bin/bash
#SBATCH --job-name=tfdml
#SBATCH --ntasks={1 + servers + workers}
#SBATCH --cpus-per-task=8   # Change to what a task needs.
#SBATCH --time=24:00:00
set -euo pipefail
# Where task i runs: one line a task, in their order.
hosts=$(srun --distribution=block bash -c 'echo "$SLURM_PROCID $(hostname)"' | sort -n | \\
    cut -d" " -f2)
addresses() {{ echo "$hosts" | awk -v from="$1" -v to="$2" -v port={PORT} \\
    'NR > from && NR <= to {{ printf "%s\\"%s:%d\\"", sep, $1, port + NR; sep = "," }}'; }}
export TFDML_CLUSTER="{{\\"chief\\": [$(addresses 0 1)], \\
\\"ps\\": [$(addresses 1 {1 + servers})], \\
\\"worker\\": [$(addresses {1 + servers} {1 + servers + workers})]}}"
# The chief's end ends the others. A lost worker does not end the job.
srun --distribution=block bash -c '
    i=$SLURM_PROCID
    if [ $i -eq 0 ]; then role=chief
    elif [ $i -le {servers} ]; then role=ps; i=$((i - 1))
    else role=worker; i=$((i - {1 + servers})); fi
    task="{{\\"type\\": \\"$role\\", \\"index\\": $i}}"
    export TF_CONFIG="{{\\"cluster\\": $TFDML_CLUSTER, \\"task\\": $task}}"
    if [ $role = chief ]; then exec "$@"; fi
    exec tfdml serve' bash {shlex.join(["python", *program])}
"""


def kubernetes(workers: int, servers: int, program: Sequence[str]) -> str:
    """Returns a TFJob: its operator sets `TF_CONFIG` in every pod.

    Args:
        workers: The number of workers.
        servers: The number of parameter servers.
        program: The script and its arguments.
    """
    roles = {
        "Chief": (1, ["python", *program], "Never"),
        "PS": (servers, ["tfdml", "serve"], "OnFailure"),
        "Worker": (workers, ["tfdml", "serve"], "OnFailure"),
    }
    specs = "".join(
        f"""    {role}:
      replicas: {replicas}
      restartPolicy: {restart}
      template:
        spec:
          containers:
            - name: tensorflow
              image: CHANGE-ME
              command: {json.dumps(command)}
"""
        for role, (replicas, command, restart) in roles.items()
    )
    return f"""# Needs the training operator, and an image with TensorFlow, tfdml and the script.
apiVersion: kubeflow.org/v1
kind: TFJob
metadata:
  name: tfdml
spec:
  runPolicy:
    cleanPodPolicy: Running
  tfReplicaSpecs:
{specs}"""
