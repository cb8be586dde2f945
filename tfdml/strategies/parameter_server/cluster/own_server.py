"""`tfdml.Server`: TensorFlow's server in a user's script, linked with the chief.

It replaces `tf.distribute.Server`. `tfdml serve` does the same without a script.
"""

import sys
import threading
from typing import Any

import tensorflow as tf

from tfdml import topology
from tfdml.runtime.gpus import server_config
from tfdml.runtime.immediate_exit import EXIT_CODE
from tfdml.runtime.launch.supervisor import free_ports
from tfdml.runtime.servers.server import leave
from tfdml.runtime.servers.server_link import ChiefLost, follow_chief
from tfdml.runtime.servers.server_task import (
    CHIEF,
    SERVER,
    WORKER,
    ServerTask,
    checked_task,
    name_of,
)
from tfdml.runtime.servers.table_service import offer_service

_START_SECONDS = 600.0
_SILENCE_SECONDS = 60.0

# Servers of clusters without a chief's address: the chief may be a strategy in this process.
_without_chief: list["Server"] = []
# Such clusters completed with their chief, by the text of the cluster without it.
_completed: dict[str, dict[str, list[str]]] = {}


class Server(tf.distribute.Server):
    """A worker or parameter server of a `tfdml.ParameterServerStrategy`.

    Args:
        server_or_cluster_def: The cluster, as a `tf.train.ClusterSpec`, a dictionary or a protocol
            buffer.
        job_name: "worker" or "ps"; for any other job this is just TensorFlow's server.
        task_index: Index of the task in its job.
        protocol: Protocol between TensorFlow's servers; "grpc" by default.
        config: TensorFlow's configuration. By default a worker has one GPU, whose memory use grows
            as needed, and a server has none.
        start: Whether the server starts at once.

    Raises:
        ValueError: If the cluster, or this task in it, is invalid.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: tf.compat.v1.ConfigProto | None = None,
        start: bool = True,
    ):
        if config is None and job_name in (WORKER, SERVER):
            gpus = tf.config.list_physical_devices("GPU")
            config = server_config(job_name, topology.on_this_host(), len(gpus))
        offer_service()
        super().__init__(server_or_cluster_def, job_name, task_index, protocol, config, start)
        server_def = self.server_def
        self.role, self.index = server_def.job_name, server_def.task_index
        self.cluster = tf.train.ClusterSpec(server_def.cluster).as_dict()
        self._follower: threading.Thread | None = None
        self._lost: ChiefLost | None = None
        if self.role in (WORKER, SERVER) and CHIEF in self.cluster:
            self.follow(checked_task(self.cluster, self.role, self.index))
        elif self.role in (WORKER, SERVER):
            _without_chief.append(self)

    def follow(self, task: ServerTask) -> None:
        """Links this server with the chief, from now on.

        Args:
            task: This server's task, in a cluster with a chief.
        """

        def run() -> None:
            try:
                follow_chief(task, _START_SECONDS, _SILENCE_SECONDS)
            except ChiefLost as error:
                self._lost = error

        self._follower = threading.Thread(target=run, name="tfdml-server", daemon=True)
        self._follower.start()

    def join(self) -> None:
        """Serves until the chief is done or lost, and then ends the process.

        TensorFlow's own method never returns. The exit code is 0, or 70 if the chief is lost.
        """
        if self._follower is None:
            super().join()
            return
        self._follower.join()
        why = "the chief is done" if self._lost is None else f"because {self._lost}"
        name = name_of(self.role, self.index)
        print(f"tfdml: {name} ends, {why}.", file=sys.stderr, flush=True)
        leave(0 if self._lost is None else EXIT_CODE)


def with_chief_here(cluster: dict[str, list[str]]) -> dict[str, list[str]]:
    """Adds this process as the chief of a cluster whose servers all run in this process.

    Args:
        cluster: Addresses of each role, from the resolver.

    Returns:
        The cluster with a chief, which the servers then follow; or `cluster` itself if some of its
        servers run elsewhere.
    """
    servers = [server for server in _without_chief if server.cluster == cluster]
    here = {(server.role, server.index) for server in servers}
    tasks = {(role, i) for role in (WORKER, SERVER) for i in range(len(cluster.get(role, ())))}
    if not tasks or here != tasks:
        return cluster
    if str(cluster) not in _completed:
        whole = {**cluster, CHIEF: [f"localhost:{free_ports(1)[0]}"]}
        for server in servers:
            server.follow(checked_task(whole, server.role, server.index))
        _completed[str(cluster)] = whole
    return _completed[str(cluster)]
