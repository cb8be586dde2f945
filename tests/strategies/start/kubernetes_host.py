"""One pod of a cluster, on a host of a network lab: kubernetes_host.py DIRECTORY

The first one also serves the API requests of the resolver: the list of pods.
"""

import http.server
import json
import os
import sys
import threading
import time
import urllib.request

from tests.strategies.start import resolver_program

PORT = 8001


def pods(addresses: list[str]) -> bytes:
    """Returns a `v1` PodList of running pods, each on its own machine."""
    items = [
        {
            "metadata": {"name": f"worker-{i}", "namespace": "default"},
            "status": {"phase": "Running", "hostIP": address, "podIP": address},
        }
        for i, address in enumerate(addresses)
    ]
    return json.dumps({"apiVersion": "v1", "kind": "PodList", "items": items}).encode()


class ApiServer(http.server.BaseHTTPRequestHandler):
    """Answers `list_pod_for_all_namespaces`."""

    def do_GET(self) -> None:
        """Answers one request."""
        known = self.path.startswith("/api/v1/pods?labelSelector=job-name%3Dtensorflow")
        body = pods(os.environ["NETLAB_ADDRESSES"].split(",")) if known else b"{}"
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Suppresses the log."""


def main(directory: str) -> None:
    """Trains as one of the pods."""
    chief, host = os.environ["NETLAB_ADDRESSES"].split(",")[0], os.environ["NETLAB_HOST"]
    if host == "0":
        server = http.server.ThreadingHTTPServer((chief, PORT), ApiServer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://{chief}:{PORT}"
    for _ in range(100):  # The first host may start last.
        try:
            urllib.request.urlopen(f"{url}/api/v1/pods?labelSelector=job-name%3Dtensorflow").read()
            break
        except OSError:
            time.sleep(0.2)
    resolver_program.main(directory, "kubernetes", host, url)


if __name__ == "__main__":
    main(sys.argv[1])
