"""Hosts of a network lab that reach each other by ssh, with a real sshd on each.

Needs root, for the lab, and Debian's openssh-server; `tools/test --all` installs it.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdml.horovod_build import child

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_on_hosts(
    scratch: Path,
    hosts: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float = 240.0,
) -> child.ChildResult:
    """Runs a command on the first of several hosts, `host0`, `host1`, ...; the lab ends with it.

    Args:
        scratch: Directory for keys and notes.
        hosts: Number of hosts.
        command: Command to run on the first host.
        environment: Environment of the command.
        timeout: Seconds until everything is ended.
    """
    ssh = scratch / "ssh"
    ssh.mkdir()
    for name in ("host_key", "user_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / name)]
        subprocess.run(make, check=True, timeout=30)
    (ssh / "sshd_config").write_text(
        "HostKey /etc/ssh/host_key\nAuthorizedKeysFile /etc/ssh/user_key.pub\nStrictModes no\n"
        "PermitRootLogin yes\nUsePAM no\nPidFile none\n"
    )
    (ssh / "ssh_config").write_text(
        "IdentityFile /etc/ssh/user_key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    lab = [str(ROOT / "tools" / "netlab"), "--hosts", str(hosts), "--"]
    inside = [str(HERE / "ssh_host.sh"), str(scratch), *command]
    return child.run([*lab, *inside], environment=environment, timeout=timeout, cwd=ROOT)
