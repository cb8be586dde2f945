"""The chief's connection to a cluster of parameter servers, made once per process."""

import dataclasses

import tensorflow as tf

from tfdml.runtime.launch.supervisor import free_ports
from tfdml.runtime.servers.server_link import ServerLink
from tfdml.runtime.servers.server_task import (
    CHIEF,
    ServerTask,
    checked_task,
    task_from_environment,
)
from tfdml.strategies.parameter_server.cluster.own_server import with_chief_here


@dataclasses.dataclass
class Connection:
    """Connection that all strategies of this process share.

    Attributes:
        task: The chief's task.
        link: Link that monitors which tasks are alive.
        resolver: TensorFlow's view of the cluster, in which the chief has a different port, because
            the link listens on the port from `TF_CONFIG`.
        connected: Whether TensorFlow is connected.
    """

    task: ServerTask
    link: ServerLink
    resolver: tf.distribute.cluster_resolver.ClusterResolver
    connected: bool = False


_connections: dict[str, Connection] = {}


def chief_task(resolver: tf.distribute.cluster_resolver.ClusterResolver | None) -> ServerTask:
    """Returns the chief's task.

    Args:
        resolver: Resolver that describes the cluster; reads `TF_CONFIG` by default.

    Raises:
        ValueError: If the cluster does not consist of a chief, workers and servers, or this process
            is not its chief.
    """
    if resolver is None:
        task = task_from_environment()
    else:
        cluster = with_chief_here(resolver.cluster_spec().as_dict())
        role = resolver.task_type or CHIEF
        task = checked_task(cluster, role, resolver.task_id or 0)
    if task.role != CHIEF:
        raise ValueError(
            f"The training script must run only on the chief. Received: this process is "
            f"{task.name} of the cluster. Run `tfdml serve` here instead of the script."
        )
    return task


def connect(task: ServerTask, start_limit: float, silence_limit: float) -> Connection:
    """Waits for the workers and servers the first time; later calls return the same connection.

    Args:
        task: The chief's task.
        start_limit: Seconds to wait.
        silence_limit: Seconds without a sign of life after which a task is taken for lost.

    Raises:
        ValueError: If this process is already connected to another cluster.
        OSError: If the chief's port is taken.
        TimeoutError: If a worker or server does not start in time.
    """
    key = repr(task)
    if _connections and key not in _connections:
        raise ValueError(
            f"`cluster_resolver` must describe the cluster that this process is in already. "
            f"Received: {task.cluster}. Start another process for another cluster."
        )
    if key in _connections:
        return _connections[key]
    link = ServerLink(task, silence_limit)
    link.wait_for_peers(start_limit)
    host = task.address.rpartition(":")[0]
    cluster = {**task.cluster, CHIEF: [f"{host}:{free_ports(1)[0]}"]}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type=CHIEF, task_id=0, rpc_layer="grpc"
    )
    _connections[key] = Connection(task, link, resolver)
    return _connections[key]
