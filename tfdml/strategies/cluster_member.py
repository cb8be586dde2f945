"""TensorFlow's server in this process, started once for the cluster that a resolver describes."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator

import tensorflow as tf

from tfdml.runtime.rendezvous import exit_after, wait_for_peers
from tfdml.strategies.tensorflow_seam import heartbeat_limit
from tfdml.topology import Topology

# Seconds without a message after which TensorFlow takes a worker for lost; an answer may take half
# as long. By default they are 10: an outage of so long would end the job, and even of 5. After it,
# TCP may need 13 s to resume. Much longer would be late if a worker dies before there is a guard.
_HEARTBEAT_LIMIT = 40.0


@dataclasses.dataclass(frozen=True)
class ClusterMember:
    """This process as a member of a running cluster.

    Attributes:
        topology: Its rank among the chief and the workers.
        devices: Names of its devices with job and task: all GPUs, or the first CPU.
        resolver: Resolver that describes the cluster.
        server: TensorFlow's strategy, which owns the running server.
    """

    topology: Topology
    devices: tuple[str, ...]
    resolver: tf.distribute.cluster_resolver.ClusterResolver
    server: tf.distribute.Strategy


# TensorFlow starts one server per process; a second strategy for the same cluster shares it.
_members: dict[tuple, ClusterMember] = {}


def join(
    resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
    options: tf.distribute.experimental.CommunicationOptions,
    start_limit: float,
) -> ClusterMember | None:
    """Starts this process's server and waits for the other processes; only the first time.

    Args:
        resolver: Resolver that describes the cluster; reads `TF_CONFIG` by default.
        options: TensorFlow's communication options.
        start_limit: Seconds to wait for the other processes.

    Returns:
        The member, or None if the cluster is this process alone.

    Raises:
        ValueError: If the resolver names a task that does not train, a cluster with parameter
            servers, or one other than that which this process has joined.
        OSError: If this process's port is taken.
        TimeoutError: If the other processes do not start in time.
    """
    resolver = resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec().as_dict()
    if cluster.get("ps"):
        raise ValueError(
            f"`cluster_resolver` must describe a cluster of workers without parameter servers. "
            f"Received: {cluster}. Use `tfdml.ParameterServerStrategy` on the chief, or start the "
            f"job without parameter servers: `tfdml launch --workers 2`."
        )
    topology = _topology(cluster, resolver.task_type, resolver.task_id)
    if topology.size == 1:
        return None
    key = (repr(sorted(cluster.items())), resolver.task_type, resolver.task_id)
    if _members and key not in _members:
        raise ValueError(
            f"`cluster_resolver` must describe the cluster that this process is in already: "
            f"TensorFlow starts one server in a process. Received on rank {topology.rank}: "
            f"{cluster}. Start another process for another cluster."
        )
    if key not in _members:
        # TensorFlow's own strategy starts the server and the coordination service; its
        # collectives are not used.
        addresses = [cluster[job][index] for job, index in _order(cluster)]
        wait_for_peers(addresses, topology.rank, start_limit)
        patient = heartbeat_limit(_HEARTBEAT_LIMIT)
        with exit_after(start_limit), _sigterm_left_alone(), patient:
            server = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        _members[key] = ClusterMember(topology, server.extended.worker_devices, resolver, server)
    return _members[key]


@contextlib.contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Context manager: restores SIGTERM's handler; TensorFlow's servers replace it by a no-op."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    # Python sets handlers only in its main thread, and cannot restore one it did not install.
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _topology(
    cluster: dict[str, list[str]], task_type: str | None, task_id: int | None
) -> Topology:
    """Returns the topology of a task; the chief (or "master") is first, then the workers."""
    order = _order(cluster)
    if not order:
        return Topology()
    if len(order) == 1 and (task_type or order[0][0]) == order[0][0]:
        return Topology(launcher="cluster resolver")
    if (task_type, task_id) not in order:
        raise ValueError(
            f"`cluster_resolver` must say which chief or worker this process is. Received: "
            f"task_type={task_type!r}, task_id={task_id!r} in the cluster {cluster}. Set `task` in "
            f"TF_CONFIG, or the resolver's `task_type` and `task_id`."
        )
    return Topology(
        order.index((task_type, task_id)), len(order), launcher="TensorFlow's cluster resolver"
    )


def _order(cluster: dict[str, list[str]]) -> list[tuple[str, int]]:
    """Returns the tasks that train, in the order of their ranks."""
    jobs = ("chief", "master", "worker")
    return [(job, index) for job in jobs for index in _tasks(cluster.get(job))]


def _tasks(job: list[str] | dict[int, str] | None) -> list[int]:
    return sorted(job) if isinstance(job, dict) else list(range(len(job or [])))
