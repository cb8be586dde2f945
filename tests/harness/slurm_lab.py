"""Two nodes of a real Slurm on hosts of a network lab: slurmctld, and slurmd on each.

Needs root, for the lab, and Debian's slurm-wlm, munge and openssh-server; `tools/test --all`
installs them. The partition `high` preempts jobs of the partition `low`, which is the default.
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness import ssh_lab
from tfdml.horovod_build import child

# Two processors of the machine are 64 of Slurm's, as much as the printed scripts ask for. A job
# that is preempted gets SIGTERM, and has 100 s. A requeued job waits as long as credentials live.
_CONFIG = """
ClusterName=lab
SlurmctldHost=host0
SlurmUser=root
MailProg=/bin/true
AuthType=auth/munge
AuthInfo=socket={0}/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={0}/slurmctld
SlurmdSpoolDir={0}/%n
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/%n.pid
SlurmctldLogFile={0}/slurmctld.log
SlurmdLogFile={0}/%n.log
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=host[0-1] CPUs=64
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=100
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
_SERVICES = """
export SLURM_CONF={0}/slurm.conf
if [ "$NETLAB_HOST" = 0 ]; then
    munged --force --key-file={0}/munge.key --socket={0}/munge.socket --pid-file={0}/munge.pid \
        --log-file={0}/munge.log --seed-file={0}/munge.seed
    slurmctld
    touch {0}/begun
fi
until [ -e {0}/begun ]; do sleep 0.1; done
slurmd
if [ "$NETLAB_HOST" = 0 ]; then
    until [ "$(sinfo -h -N -o %T | sort -u)" = idle ]; do sleep 0.2; done
fi
"""


def run_on_slurm(
    scratch: Path, command: Sequence[str], environment: Mapping[str, str], timeout: float = 300.0
) -> child.ChildResult:
    """Runs a command on the first node, `host0`, as soon as both nodes are idle.

    Args:
        scratch: Directory for Slurm's files.
        command: Command to run.
        environment: Environment of the command and of the nodes' services.
        timeout: Seconds until everything is ended.
    """
    slurm = scratch / "slurm"
    for name in ("slurmctld", "host0", "host1"):
        (slurm / name).mkdir(parents=True)
    (slurm / "slurm.conf").write_text(_CONFIG.format(slurm))
    (slurm / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (slurm / "munge.key").write_bytes(secrets.token_bytes(128))
    (slurm / "munge.key").chmod(0o400)
    (scratch / "services.sh").write_text(_SERVICES.format(slurm))
    return ssh_lab.run_on_hosts(scratch, 2, command, environment, timeout)
