"""Host 0 of a lab of two: follows SECURITY.md, runs a job, and captures the raw link.

    tunnel_lab.py DIRECTORY TUNNEL FIREWALL KIND

TUNNEL is "none", "wireguard" or "ssh"; FIREWALL is 1 or 0. The hosts get the names and addresses
of SECURITY.md, and its blocks of commands and files are run and written verbatim. The captured
traffic is printed as JSON after "HEARD ".
"""

import collections
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("tunnel_program.py")
# Bytes that only rank 0's model has, and messages between the guard's ranks.
MODEL = b"tfdml-clear-text"
GUARD = b'"kind": "beat"'
NODES = {"node1": "192.0.2.1", "node2": "192.0.2.2"}
INTERFACES = {"none": "eth0", "wireguard": "wg0", "ssh": "tun0"}
_ETH_P_ALL = 3


def blocks(section: str) -> Iterator[tuple[list[str], str | None, str]]:
    """Yields a section's blocks that name machines: the machines, the file or None, the text."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    text = re.search(rf"^### {re.escape(section)}\n(.*?)^##", text, re.M | re.S | re.I)[1]
    for body in re.findall(r"^```\w+\n(.*?)^```", text, re.M | re.S):
        label, _, rest = body.partition("\n")
        machines, file = re.fullmatch(
            r"# (node1 and node2|node1|node2).*?(?:: (/\S+))?", label
        ).groups()
        yield machines.split(" and "), file, rest


class Listener:
    """Captures all traffic on this host's link, in both directions.

    Attributes:
        carried: Bytes of payload by protocol and lower port, such as "tcp/22".
        clear: Names of the known bytes that were seen.
    """

    def __init__(self) -> None:
        self.carried: collections.Counter[str] = collections.Counter()
        self.clear: set[str] = set()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self._socket.bind(("eth0", 0))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            frame = self._socket.recv(1 << 18)
            for name, known in (("model", MODEL), ("guard", GUARD)):
                if known in frame:
                    self.clear.add(name)
            if frame[12:14] != b"\x08\x00":
                continue
            packet = frame[14 : 14 + int.from_bytes(frame[16:18], "big") or None]
            start, protocol = (packet[0] & 15) * 4, packet[9]
            if protocol not in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                continue
            tcp = protocol == socket.IPPROTO_TCP
            header = (packet[start + 12] >> 4) * 4 if tcp else 8
            ports = [int.from_bytes(packet[start + i : start + i + 2], "big") for i in (0, 2)]
            if len(packet) > start + header:
                self.carried[f"{'tcp' if tcp else 'udp'}/{min(ports)}"] += len(packet)


class Machines:
    """The two hosts under the names of SECURITY.md; this process is on node1."""

    def __init__(self) -> None:
        # The lab's own addresses are used until the hosts have those of the text.
        self._address = "10.77.0.2"

    def run(self, node: str, script: str) -> str:
        """Runs a shell script on a machine, and returns its output."""
        command = ["bash", "-ec", script]
        if node == "node2":
            command = ["ssh", "-n", self._address, shlex.join(command)]
        # Not a pipe: background processes would keep it open.
        with tempfile.TemporaryFile("w+") as output_file:
            code = subprocess.run(
                command, stdout=output_file, stderr=output_file, timeout=60
            ).returncode
            output_file.seek(0)
            output = output_file.read()
        if code:
            raise RuntimeError(f"On {node}:\n{script}\n{output}")
        return output

    def prepare(self, directory: Path, names: str) -> None:
        """Gives the hosts the text's addresses and names, and their own directories.

        Args:
            directory: Directory of the hosts' files.
            names: Names in their /etc/hosts, apart from `localhost`.
        """
        for node, address in NODES.items():
            hosts = directory / f"hosts-{node}"
            hosts.write_text("127.0.0.1 localhost\n" + names)
            self.run(
                node,
                f"mount -t tmpfs tmpfs /run; mkdir /run/sshd /run/wireguard\n"
                f"mkdir -p /etc/wireguard; mount -t tmpfs tmpfs /etc/wireguard\n"
                f"mount --bind {hosts} /etc/hosts; hostname {node}\n"
                f"ip address add {address}/24 dev eth0",
            )
        self._address = NODES["node2"]
        for index, node in enumerate(NODES, 1):
            self.run(node, f"ip address del 10.77.0.{index}/24 dev eth0")

    def follow(self, section: str) -> None:
        """Executes the blocks of a section."""
        keys = {}
        for nodes, file, text in blocks(section):
            for node in nodes:
                for other, key in keys.items():
                    text = text.replace(f"PUBLIC_KEY_OF_{other.upper()}", key)
                if file:
                    self.run(node, f"cat >>{file} <<'END'\n{text}END\n")
                    continue
                # The lab has only one user, and no systemd.
                text = text.replace("user alice", "user root").replace("alice@", "root@")
                if "systemctl reload ssh\n" in text:
                    text = text.replace("systemctl reload ssh\n", "")
                    reload_sshd()
                output = self.run(node, text)
                if "wg pubkey" in text:
                    keys[node] = output.strip()


def reload_sshd() -> None:
    """Replaces `systemctl reload ssh` on all hosts of the lab."""
    for process in psutil.process_iter(["cmdline"]):
        shown = " ".join(process.info["cmdline"] or [])
        if "sshd" in shown and "[listener]" in shown:
            process.send_signal(signal.SIGHUP)
    time.sleep(1.0)


def job(tunnel: str, kind: str) -> str:
    """Returns the section's command for a kind of job, with this environment's programs."""
    tool = "horovodrun" if kind.startswith("horovod") else "tfdml"
    [command] = [text for _, _, text in blocks("The job") if text.startswith(f"{tool} ")]
    run = f"{sys.executable} {Path(sys.executable).with_name(tool)}"
    command = command.replace("wg0", INTERFACES[tunnel]).replace(" python ", f" {sys.executable} ")
    return command.replace(tool, run, 1).replace("train.py", f"{PROGRAM} {kind}")


def main(directory: str, tunnel: str, firewall: str, kind: str) -> int:
    """Creates the tunnel, runs the job, and prints the traffic on the link."""
    machines = Machines()
    raw = "".join(f"{address} {node}\n" for node, address in NODES.items())
    machines.prepare(Path(directory), raw if tunnel == "none" else "")
    if tunnel != "none":
        machines.follow(f"The tunnel: {tunnel}")
        machines.follow("Names and a firewall")
        if not int(firewall):
            for node in NODES:
                machines.run(node, "nft delete table inet tfdml")
    heard = Listener()
    code = subprocess.run(["bash", "-c", job(tunnel, kind)], timeout=240).returncode
    found = {"clear": sorted(heard.clear), "carried": heard.carried}
    print("HEARD", json.dumps(found), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
