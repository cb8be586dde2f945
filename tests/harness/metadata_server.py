"""Stand-in for the metadata servers of AWS, Azure and Google, by their documents.

`tfdml/runtime/preemption_notices.py` names the documents.
"""

import contextlib
import datetime
import email.utils
import http.client
import http.server
import json
import secrets
import threading
import time
from urllib.parse import parse_qs, urlsplit

NAME = "worker_3"
# What each cloud's server answers while the machine is not about to be taken away.
QUIET = {"aws": None, "azure": [], "google": False, "other": None}


def aws_notice(seconds: float, action: str = "terminate") -> dict[str, str]:
    """Returns the item `spot/instance-action` of an instance that has some seconds left."""
    return {"action": action, "time": f"{_after(seconds):%Y-%m-%dT%H:%M:%SZ}"}


def azure_event(seconds: float | None, kind: str = "Preempt", *names: str) -> dict[str, object]:
    """Returns a scheduled event; `seconds` is None if it has started."""
    started = seconds is None
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Started" if started else "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(names or (NAME,)),
        "NotBefore": "" if started else email.utils.format_datetime(_after(seconds), usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


class MetadataServer:
    """Metadata server of one machine, in threads of this process.

    Args:
        cloud: "aws", "azure" or "google"; "other" for a server that is no cloud's.
        notice: The machine's notice: an `aws_notice`, a list of `azure_event`s, or for Google
            whether it is preempted; of the other server the status and text of all its answers.
        host: Address to listen at.
        port: Port to listen at, 0 for a free one.

    Attributes:
        notice: As above; may be changed at any time.
        asked: Methods and paths of the requests so far.
        delay: Seconds before it answers a request for notices.
        tokens: The tokens that EC2's has given.
        has_given_notice: Set once it has sent a notice.
        address: Its host and port.
    """

    def __init__(self, cloud: str, notice=None, host: str = "127.0.0.1", port: int = 0):
        self.notice = QUIET[cloud] if notice is None else notice
        self.asked: list[str] = []
        self.delay = 0.0
        self.tokens: set[str] = set()
        self.has_given_notice = threading.Event()
        handler = _HANDLERS[cloud]
        self._server = http.server.ThreadingHTTPServer((host, port), handler)
        self._server.metadata = self
        self.address = f"{host}:{self._server.server_port}"

    def __enter__(self) -> "MetadataServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def give_notice(address: str, notice: object) -> None:
    """Makes a server give a notice, and waits until somebody has read it.

    Args:
        address: The server's `address`.
        notice: As in `MetadataServer`.
    """
    with contextlib.closing(http.client.HTTPConnection(address, timeout=90)) as server:
        server.request("PUT", "/test/notice", json.dumps(notice))
        if server.getresponse().status != 200:
            raise TimeoutError(f"Nobody asked {address} for notices.")


class _Handler(http.server.BaseHTTPRequestHandler):
    """Common base of the three clouds' answers, with the request of `give_notice`."""

    @property
    def metadata(self) -> MetadataServer:
        return self.server.metadata

    def do_GET(self) -> None:
        self._handle("GET")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def _handle(self, method: str) -> None:
        if method == "PUT" and self.path == "/test/notice":
            length = int(self.headers["Content-Length"])
            self.metadata.notice = json.loads(self.rfile.read(length))
            self._send(200 if self.metadata.has_given_notice.wait(60) else 504, "")
            return
        self.metadata.asked.append(f"{method} {self.path}")
        # Through a proxy, another machine's notices would be read.
        forwarded = "X-Forwarded-For" in self.headers or "://" in self.path
        self._send(*((403, "") if forwarded else self.answer(method)))

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        with contextlib.suppress(ConnectionError):  # Nobody may be waiting any more.
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        if self.path in NOTICE_PATHS and self.metadata.notice:
            self.metadata.has_given_notice.set()

    def log_message(self, format: str, *args: object) -> None:
        """Suppresses the log."""


class _Aws(_Handler):
    def answer(self, method: str) -> tuple[int, str]:
        if (method, self.path) == ("PUT", "/latest/api/token"):
            seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not (seconds.isdecimal() and 1 <= int(seconds) <= 21600):
                return 400, "Missing or Invalid Parameters"
            token = secrets.token_hex(16)
            self.metadata.tokens.add(token)
            return 200, token
        if self.headers.get("X-aws-ec2-metadata-token") not in self.metadata.tokens:
            return 401, "Unauthorized"
        if self.path == "/latest/meta-data/events/recommendations/rebalance":
            return 200, json.dumps({"noticeTime": f"{_after(0):%Y-%m-%dT%H:%M:%SZ}"})
        if self.path == "/latest/meta-data/spot/instance-action" and self.metadata.notice:
            time.sleep(self.metadata.delay)
            return 200, json.dumps(self.metadata.notice)
        return 404, "404 - Not Found"


class _Azure(_Handler):
    def answer(self, method: str) -> tuple[int, str]:
        url = urlsplit(self.path)
        given = {name: values[0] for name, values in parse_qs(url.query).items()}
        if self.headers.get("Metadata") != "true" or "api-version" not in given:
            return 400, "Bad request"
        if url.path == "/metadata/scheduledevents" and given == {"api-version": "2020-07-01"}:
            time.sleep(self.metadata.delay)
            events = self.metadata.notice
            return 200, json.dumps({"DocumentIncarnation": 1 + bool(events), "Events": events})
        # A leaf is text only.
        if url.path == "/metadata/instance/compute/name" and given.get("format") == "text":
            return 200, NAME
        return 404, "Not found"


class _Google(_Handler):
    def answer(self, method: str) -> tuple[int, str]:
        if self.headers.get("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header"
        if self.path != "/computeMetadata/v1/instance/preempted":
            return 404, "Not found"
        time.sleep(self.metadata.delay)
        return 200, "TRUE" if self.metadata.notice else "FALSE"


class _Other(_Handler):
    def answer(self, method: str) -> tuple[int, str]:
        return self.metadata.notice


_HANDLERS = {"aws": _Aws, "azure": _Azure, "google": _Google, "other": _Other}
NOTICE_PATHS = (
    "/latest/meta-data/spot/instance-action",
    "/metadata/scheduledevents?api-version=2020-07-01",
    "/computeMetadata/v1/instance/preempted",
)


def _after(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
