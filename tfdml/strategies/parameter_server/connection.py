"""The chief's connection to a cluster of parameter servers: made once in a process."""

import dataclasses

import tensorflow as tf

from tfdml.runtime.server_link import ServerLink
from tfdml.runtime.server_task import (
    CHIEF,
    Task,
    checked_task,
    task_from_environment,
)
from tfdml.runtime.supervisor import free_ports
from tfdml.strategies.parameter_server.own_server import with_chief_here


@dataclasses.dataclass
class Connection:
    """What all strategies of this process share.

    Attributes:
        task: The chief's task.
        link: What tells who lives.
        resolver: The cluster as TensorFlow has it: the chief's port is another one there, because
            the link listens on the one that `TF_CONFIG` names.
        connected: Whether TensorFlow is connected.
    """

    task: Task
    link: ServerLink
    resolver: tf.distribute.cluster_resolver.ClusterResolver
    connected: bool = False


_connections: dict[str, Connection] = {}


def chief_task(resolver: tf.distribute.cluster_resolver.ClusterResolver | None) -> Task:
    """Returns the chief's task.

    Args:
        resolver: What describes the cluster; `TF_CONFIG` by default.

    Raises:
        ValueError: If the cluster is not one of a chief, workers and servers, or this process is
            not its chief.
    """
    if resolver is None:
        task = task_from_environment()
    else:
        cluster = with_chief_here(resolver.cluster_spec().as_dict())
        role = resolver.task_type or CHIEF
        task = checked_task(cluster, role, resolver.task_id or 0)
    if task.role != CHIEF:
        raise ValueError(
            f"The training script must run on the chief alone. Received: this process is "
            f"{task.name} of the cluster. Run `tfdml serve` here instead of the script."
        )
    return task


def connect(task: Task, start_limit: float, silence_limit: float) -> Connection:
    """Waits for the workers and servers; once.

    Args:
        task: The chief's task.
        start_limit: Seconds to wait.
        silence_limit: Seconds after which a task that nothing is heard of is taken for lost.

    Raises:
        ValueError: If this process is connected to another cluster already.
        OSError: If the chief's port is taken.
        TimeoutError: If a worker or server has not come in time.
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
    link.wait_for_all(start_limit)
    host = task.address.rpartition(":")[0]
    cluster = {**task.cluster, CHIEF: [f"{host}:{free_ports(1)[0]}"]}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type=CHIEF, task_id=0, rpc_layer="grpc"
    )
    _connections[key] = Connection(task, link, resolver)
    return _connections[key]
