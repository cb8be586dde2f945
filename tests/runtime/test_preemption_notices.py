"""Checks that the clouds' preemption notices are read as their documents say, and no others."""

import re
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.harness.command import ROOT
from tests.harness.metadata_server import NAME, MetadataServer, aws_notice, azure_event
from tfdml.runtime import preemption_notices
from tfdml.runtime.preemption_notices import preemption_notice


@pytest.fixture
def ask(monkeypatch) -> Callable[[str, str], str | None]:
    """Returns a function that asks a cloud's server at another address."""

    def asked(cloud: str, address: str) -> str | None:
        monkeypatch.setitem(preemption_notices.ADDRESSES, cloud, address)
        return preemption_notice(cloud)

    return asked


def seconds_of(notice: str, start: str) -> int:
    """Returns the seconds that a notice says are left."""
    return int(re.fullmatch(rf"{start} in (\d+) s", notice)[1])


@pytest.mark.parametrize("cloud", ["aws", "azure", "google"])
def test_no_notice(ask, cloud):
    """EC2's has the rebalance recommendation at the same time, which ends no job."""
    with MetadataServer(cloud) as server:
        assert ask(cloud, server.address) is None
        assert server.asked


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_notice_of_aws(ask, action):
    with MetadataServer("aws", aws_notice(120, action)) as server:
        assert 60 < seconds_of(ask("aws", server.address), action) <= 120
        assert server.asked == [
            "PUT /latest/api/token",
            "GET /latest/meta-data/spot/instance-action",
        ]


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
def test_notice_of_azure(ask, kind):
    with MetadataServer("azure", [azure_event(300, kind, "worker_2", NAME)]) as server:
        assert 240 < seconds_of(ask("azure", server.address), kind) <= 300
        server.notice = [azure_event(None, kind)]
        assert ask("azure", server.address) == f"{kind} now"


def test_other_events_of_azure(ask):
    """Those of other machines, even if their names are alike, and those that a machine survives."""
    others = [azure_event(30, "Preempt", f"{NAME}1", "other"), azure_event(30, "Terminate", "x")]
    survived = [azure_event(30, kind) for kind in ("Freeze", "Reboot", "Redeploy")]
    with MetadataServer("azure", others + survived) as server:
        assert ask("azure", server.address) is None
        server.notice += [azure_event(30)]
        assert ask("azure", server.address).startswith("Preempt in")


def test_notice_of_google(ask):
    with MetadataServer("google", True) as server:
        assert ask("google", server.address) == "preempted, usually within 30 s"


def test_a_notice_counts_whatever_its_time(ask):
    with MetadataServer("aws", {"action": "stop", "time": "soon"}) as server:
        assert ask("aws", server.address) == "stop at 'soon'"
        server.notice = aws_notice(-3, "stop")
        assert ask("aws", server.address) == "stop in 0 s"


def test_azure_may_take_its_time_for_events(ask, monkeypatch):
    monkeypatch.setattr(preemption_notices, "ANSWER_SECONDS", 0.2)
    with MetadataServer("azure", [azure_event(None)]) as server:
        server.delay = 0.6
        assert ask("azure", server.address) == "Preempt now"


@pytest.mark.parametrize("cloud", ["aws", "google"])
def test_a_slow_server(ask, monkeypatch, cloud):
    monkeypatch.setattr(preemption_notices, "ANSWER_SECONDS", 0.2)
    with MetadataServer(cloud, {"aws": aws_notice(9), "google": True}[cloud]) as server:
        server.delay = 0.6
        with pytest.raises(OSError, match="timed out"):
            ask(cloud, server.address)


@pytest.mark.parametrize(
    ("cloud", "there"),
    [("aws", "google"), ("aws", "azure"), ("azure", "google"), ("google", "aws")],
)
def test_another_clouds_server(ask, cloud, there):
    """It is an error, not the absence of a notice."""
    with MetadataServer(there) as server, pytest.raises(OSError, match="status 40"):
        ask(cloud, server.address)


@pytest.mark.parametrize("cloud", ["aws", "azure", "google"])
def test_a_server_that_is_no_clouds(ask, cloud):
    """It finds nothing, which must not pass for EC2's "no notice", or shows a page for all."""
    with MetadataServer("other", (404, "Not found")) as server:
        with pytest.raises(OSError, match="status 404"):
            ask(cloud, server.address)
        server.notice = (200, "<html>Log in</html>")
        with pytest.raises(ValueError, match="neither TRUE nor FALSE|Expecting value"):
            ask(cloud, server.address)


@pytest.mark.parametrize("cloud", ["aws", "azure", "google"])
def test_no_server(ask, cloud):
    with socket.socket() as bound:  # Nobody else can listen there meanwhile.
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            ask(cloud, f"127.0.0.1:{bound.getsockname()[1]}")


@pytest.mark.parametrize("notice", [["stop"], {"time": "2017-09-18T08:22:00Z"}])
def test_an_answer_of_another_form(ask, notice):
    with MetadataServer("aws", notice) as server, pytest.raises(ValueError, match="another form"):
        ask("aws", server.address)


IN_A_NAMESPACE = """
ip link set lo up && ip address add 169.254.169.254/32 dev lo || exit
echo 169.254.169.254 metadata.google.internal > "$0/hosts" && mount --bind "$0/hosts" /etc/hosts
exec "$@"
"""
AT_THE_REAL_ADDRESS = """
from tests.harness.metadata_server import MetadataServer, aws_notice, azure_event
from tfdml.runtime.preemption_notices import preemption_notice
notices = {"aws": aws_notice(90), "azure": [azure_event(90)], "google": True}
for cloud, notice in notices.items():
    with MetadataServer(cloud, notice, "169.254.169.254", 80):
        print(cloud, preemption_notice(cloud))
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode != 0,
    reason="needs root, and to be allowed to make namespaces",
)
def test_the_real_addresses_without_a_proxy(tmp_path, monkeypatch):
    """In a namespace with the clouds' address, where a proxy that answers nothing is set."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    asked = [sys.executable, "-c", AT_THE_REAL_ADDRESS]
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", IN_A_NAMESPACE, str(tmp_path), *asked],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert re.fullmatch(
        r"aws terminate in \d+ s\nazure Preempt in \d+ s\ngoogle preempted, .*\n", done.stdout
    ), done.stderr
