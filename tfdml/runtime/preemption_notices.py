"""Preemption notices: a cloud's announcement that it is about to take this machine away.

Each cloud gives it by the metadata server that its machines reach at a link-local address.

Reference, by the titles of the clouds' documents:
    - Amazon EC2 User Guide, "Spot Instance interruption notices" and "Use IMDSv2".
    - Azure Virtual Machines, "Azure Metadata Service: Scheduled Events for Linux VMs" and "Azure
      Instance Metadata Service".
    - Google Compute Engine, "Create and use Spot VMs" and "Create and use preemptible VMs".
"""

import contextlib
import datetime
import email.utils
import http.client
import json
from collections.abc import Callable
from typing import NamedTuple

# Seconds in which a metadata server must accept a connection, and then answer: it is on this host.
ANSWER_SECONDS = 1.0
# Azure prepares its events when it is first asked for them: "a delayed response in your first call
# of up to two minutes".
AZURE_EVENTS_SECONDS = 120.0

# The host, with its port if it is not 80, of each cloud's metadata server.
ADDRESSES = {
    "aws": "169.254.169.254",
    "azure": "169.254.169.254",
    "google": "metadata.google.internal",
}


class _Answer(NamedTuple):
    """Answer of a metadata server: its status and text."""

    status: int
    text: str

    def checked(self) -> str:
        """Returns the text; raises an OSError unless the status is 200."""
        if self.status != 200:
            raise OSError(f"status {self.status}")
        return self.text


def preemption_notice(cloud: str) -> str | None:
    """Asks a cloud's metadata server whether it is about to take this machine away.

    Args:
        cloud: A key of `ADDRESSES`.

    Returns:
        The cloud's action and the time that is left, such as "terminate in 118 s"; None if there is
        no notice.

    Raises:
        OSError: If the server is not there, does not answer in time, or refuses to answer.
        ValueError: If its answer is not of the documented form.
    """
    try:
        return _NOTICES[cloud](ADDRESSES[cloud])
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP: {error!r}") from error
    except (LookupError, TypeError) as error:
        raise ValueError(f"an answer of another form: {error!r}") from error


def _aws_notice(address: str) -> str | None:
    # The rebalance recommendation is not read: with it an interruption is more likely, not certain.
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _ask(address, "/latest/api/token", seconds, method="PUT").checked()
    answer = _ask(
        address, "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
    )
    if answer.status == 404:  # As long as there is no notice.
        return None
    notice = json.loads(answer.checked())
    return f"{notice['action']} {_left(notice['time'], datetime.datetime.fromisoformat)}"


def _azure_notice(address: str) -> str | None:
    flavor = {"Metadata": "true"}
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    events = json.loads(_ask(address, path, flavor, seconds=AZURE_EVENTS_SECONDS).checked())
    # After the others, such as Freeze and Reboot, the machine is there again.
    ends = [e for e in events["Events"] if e["EventType"] in ("Preempt", "Terminate")]
    if not ends:
        return None
    # The events of a scale set or an availability set are shown to all of its machines.
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = _ask(address, path, flavor).checked()
    for event in ends:
        if name in event["Resources"]:
            left = _left(event["NotBefore"], email.utils.parsedate_to_datetime)
            return f"{event['EventType']} {left}"
    return None


def _google_notice(address: str) -> str | None:
    path = "/computeMetadata/v1/instance/preempted"
    answer = _ask(address, path, {"Metadata-Flavor": "Google"}).checked().strip()
    if answer not in ("TRUE", "FALSE"):
        raise ValueError(f"neither TRUE nor FALSE: {answer[:80]!r}")
    # It does not say when.
    return "preempted, usually within 30 s" if answer == "TRUE" else None


_NOTICES: dict[str, Callable[[str], str | None]] = {
    "aws": _aws_notice,
    "azure": _azure_notice,
    "google": _google_notice,
}


def _ask(
    address: str,
    path: str,
    headers: dict[str, str],
    *,
    method: str = "GET",
    seconds: float | None = None,
) -> _Answer:
    """Sends a metadata server a request, waiting at most `seconds` for its answer."""
    # Not by `urllib.request`, which uses proxies: they are other machines, with other notices.
    with contextlib.closing(http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)) as server:
        server.connect()
        server.sock.settimeout(seconds or ANSWER_SECONDS)
        server.request(method, path, headers=headers)
        response = server.getresponse()
        return _Answer(response.status, response.read().decode())


def _left(time: str, parse: Callable[[str], datetime.datetime]) -> str:
    """Returns how long it is until a time that a cloud has written, such as "in 118 s"."""
    if not time:
        return "now"  # Azure's is empty once the event has started.
    try:
        left = parse(time) - datetime.datetime.now(datetime.UTC)
    except (TypeError, ValueError):
        return f"at {time!r}"  # The notice counts all the same.
    return f"in {max(0.0, left.total_seconds()):.0f} s"
