"""Cases of a chief's link to its workers and servers."""

import threading

from tfdml.runtime.launch.supervisor import free_ports
from tfdml.runtime.servers.server_link import ServerLink, follow_chief
from tfdml.runtime.servers.server_task import CHIEF, SERVER, WORKER, ServerTask


def started_again_unnoticed() -> dict[str, list[int]]:
    """Returns which servers are lost when one connects again before its loss has been noticed."""
    chief, worker, server = (f"127.0.0.1:{port}" for port in free_ports(3))
    cluster = {CHIEF: [chief], WORKER: [worker], SERVER: [server]}
    link = ServerLink(ServerTask(cluster, CHIEF, 0), 60.0)

    def connect(role: str) -> None:
        arguments = (ServerTask(cluster, role, 0), 30.0, 60.0)
        threading.Thread(target=follow_chief, args=arguments, daemon=True).start()

    connect(WORKER)
    connect(SERVER)
    link.wait_for_peers(30.0)
    found = {"first": link.lost_indices(SERVER)}
    connect(SERVER)
    found["again"] = link.wait_for_loss(SERVER)
    found["missing"] = link.missing_indices(SERVER)
    found["returned"] = link.wait_for_return(SERVER, 30.0)
    found["then"] = link.lost_indices(SERVER)
    return found
