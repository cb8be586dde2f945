"""Slurm scripts of a job, which requeue it when it has saved itself before a preemption.

They are printed for the user to review and edit. The tests run them on a Slurm of two nodes.
"""

import shlex
from collections.abc import Sequence

from tfdml.runtime.immediate_exit import PREEMPTED_EXIT_CODE
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
    numbers = {host.ranks for host in hosts}
    if len(numbers) != 1:
        raise ValueError(
            f"`hosts` must each have the same number of ranks for a scheduler. Received: "
            f"{sorted(numbers)}."
        )
    (each,) = numbers
    return (each, 1) if len(hosts) == 1 and not by_node else (len(hosts), each)


def ranks(nodes: int, ranks_per_node: int, program: Sequence[str], horovod: bool) -> str:
    """Returns an sbatch script of ranks, which `srun` starts.

    Args:
        nodes: Number of machines.
        ranks_per_node: Number of ranks on each machine.
        program: Script and its arguments.
        horovod: Whether they are Horovod's ranks; otherwise each gets a TF_CONFIG.
    """
    head = f"""{_head(f"--nodes={nodes}", f"--ntasks-per-node={ranks_per_node}")}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""
    srun = "srun --distribution=block --kill-on-bad-exit=1"
    command = shlex.join(["python", *program])
    if horovod:
        return f"""{head}# Ranks meet at a server on this node. One rank that fails ends the job.
python -m tfdml.runtime.launch.horovod_rendezvous "$(printf '%s:{ranks_per_node},' $hosts)" \\
    {srun} bash -c '
    export HOROVOD_RANK=$SLURM_PROCID HOROVOD_SIZE=$SLURM_NTASKS
    export HOROVOD_LOCAL_RANK=$SLURM_LOCALID HOROVOD_LOCAL_SIZE={ranks_per_node}
    export HOROVOD_CROSS_RANK=$SLURM_NODEID HOROVOD_CROSS_SIZE={nodes}
    export HOROVOD_HOSTNAME=$SLURMD_NODENAME
    exec "$@"' bash {command} || code=$?
{_REQUEUE}"""
    return f"""{head}workers=""
for host in $hosts; do
    for local_rank in $(seq 0 {ranks_per_node - 1}); do
        workers="$workers,\\"$host:$(({PORT} + local_rank))\\""
    done
done
export TFDML_WORKERS="${{workers#,}}"
# One rank that fails ends the job.
{srun} bash -c '
    task="{{\\"type\\": \\"worker\\", \\"index\\": $SLURM_PROCID}}"
    export TF_CONFIG="{{\\"cluster\\": {{\\"worker\\": [$TFDML_WORKERS]}}, \\"task\\": $task}}"
    exec "$@"' bash {command} || code=$?
{_REQUEUE}"""


def parameter_servers(workers: int, servers: int, program: Sequence[str]) -> str:
    """Returns an sbatch script with one task each for the chief, the servers and the workers.

    Args:
        workers: Number of workers.
        servers: Number of parameter servers.
        program: Script and its arguments, which the chief runs.
    """
    return f"""{_head(f"--ntasks={1 + servers + workers}")}
# Where task i runs: one line a task, in their order.
hosts=$(srun --distribution=block bash -c 'echo "$SLURM_PROCID $(hostname)"' | sort -n | \\
    cut -d" " -f2)
addresses() {{ echo "$hosts" | awk -v from="$1" -v to="$2" -v port={PORT} \\
    'NR > from && NR <= to {{ printf "%s\\"%s:%d\\"", sep, $1, port + NR; sep = "," }}'; }}
export TFDML_CLUSTER="{{\\"chief\\": [$(addresses 0 1)], \\
\\"ps\\": [$(addresses 1 {1 + servers})], \\
\\"worker\\": [$(addresses {1 + servers} {1 + servers + workers})]}}"
# The chief's end ends the others. A lost worker does not end the job. Servers and workers ignore
# SIGTERM, as the chief saves through them.
srun --distribution=block bash -c '
    i=$SLURM_PROCID
    if [ $i -eq 0 ]; then role=chief
    elif [ $i -le {servers} ]; then role=ps; i=$((i - 1))
    else role=worker; i=$((i - {1 + servers})); fi
    task="{{\\"type\\": \\"$role\\", \\"index\\": $i}}"
    export TF_CONFIG="{{\\"cluster\\": $TFDML_CLUSTER, \\"task\\": $task}}"
    if [ $role = chief ]; then exec "$@"; fi
    trap "" TERM
    exec tfdml serve' bash {shlex.join(["python", *program])} || code=$?
{_REQUEUE}"""


def _head(*size: str) -> str:
    options = "\n".join(f"#SBATCH {option}" for option in ("--job-name=tfdml", *size))
    return f"""#!/bin/bash
{options}
#SBATCH --cpus-per-task=8   # Change to what a task needs;
##SBATCH --gpus-per-task=1  # with GPUs, remove one of the two #.
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120   # To each rank, two minutes before the end of this time: it saves.
#SBATCH --requeue           # Again after a preemption or a node's failure;
#SBATCH --open-mode=append  # its output goes on in the same file.
set -euo pipefail
code=0"""


_REQUEUE = f"""# All ranks have saved and ended, because they were asked to: go on later.
if [ $code -eq {PREEMPTED_EXIT_CODE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""
