"""Checks SECURITY.md's tunnels on two hosts of a network lab: equal results, no clear text."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ssh_lab import run_on_hosts
from tfdml.topology import child_environment

LAB = Path(__file__).with_name("tunnel_lab.py")
KINDS = ["multi_worker", "horovod", "horovod-local"]
# Protocols and ports on the link of each tunnel. The launcher's ssh uses TCP port 22 too.
CARRIES = {"wireguard": "udp/51820", "ssh": "tcp/22"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode != 0,
        reason="needs root, and to be allowed to make namespaces",
    ),
    pytest.mark.skipif(
        not (shutil.which("nft") and Path("/usr/sbin/sshd").exists()),
        reason="needs nft and sshd: apt-get install nftables openssh-server",
    ),
]


@dataclasses.dataclass(frozen=True)
class Heard:
    """Output of a job, and the traffic on the raw link.

    Attributes:
        digests: Digests of the ranks' weights.
        arrived: Whether each rank ended with the bytes that only rank 0 had at first.
        listening: Addresses on which TensorFlow's servers listened.
        clear: Known bytes that crossed the link in clear text: "model", "guard".
        carried: Bytes by protocol and port.
    """

    digests: set[str]
    arrived: list[str]
    listening: set[str]
    clear: list[str]
    carried: dict[str, int]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Returns a function that runs a job through a tunnel, once for each of its arguments."""
    done = {}

    def run(kind: str, tunnel: str, firewall: bool = True) -> Heard:
        key = (kind, tunnel, firewall)
        if key not in done:
            scratch = tmp_path_factory.mktemp("tunnel")
            command = [sys.executable, str(LAB), str(scratch), tunnel, str(int(firewall)), kind]
            output = run_on_hosts(scratch, 2, command, child_environment()).output
            trained = re.findall(r"TRAINED rank (\d) (\w+) (\w+) (\S*)$", output, re.M)
            heard = re.search(r"^HEARD (.*)$", output, re.M)
            assert sorted(t[0] for t in trained) == ["0", "1"], output
            assert heard, output
            listening = {address for t in trained for address in t[3].split(",")}
            done[key] = Heard(
                {t[1] for t in trained}, [t[2] for t in trained], listening, **json.loads(heard[1])
            )
        return done[key]

    return run


def needs(tunnel: str) -> None:
    """Skips if a tunnel's programs are missing."""
    if tunnel == "wireguard" and not shutil.which("wg-quick"):
        pytest.skip("needs wg-quick: apt-get install wireguard-tools wireguard-go")


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_tunnel_the_model_is_sent_in_clear_text(job, kind):
    """Makes sure that the other tests can fail."""
    plain = job(kind, "none")
    assert len(plain.digests) == 1
    assert plain.arrived == ["True", "True"]
    assert plain.clear == ["guard", "model"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tunnel", list(CARRIES))
def test_tunnel_encrypts_all_traffic_and_keeps_results_bit_identical(job, kind, tunnel):
    needs(tunnel)
    plain, through = job(kind, "none"), job(kind, tunnel)
    assert through.digests == plain.digests
    assert through.arrived == ["True", "True"]
    assert through.clear == []
    # The model was sent this way and no other.
    assert through.carried[CARRIES[tunnel]] > 100_000
    assert set(through.carried) <= {CARRIES[tunnel], "tcp/22"}


def test_without_the_firewall_ranks_stay_in_the_tunnel(job):
    """The guard uses the addresses of TF_CONFIG's names, although `eth0` comes first."""
    needs("wireguard")
    assert job("multi_worker", "wireguard", firewall=False).clear == []


def test_servers_of_tensorflow_listen_on_every_address(job):
    """The other reason for the firewall."""
    assert job("multi_worker", "none").listening & {"0.0.0.0", "::"}
