"""Task of a parameter server cluster: reads and validates `TF_CONFIG` before anything starts."""

import dataclasses
import json
from typing import Any

from tfdml import topology

CHIEF, WORKER, SERVER = "chief", "worker", "ps"
_ROLES = (CHIEF, WORKER, SERVER)
_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], '
    '"ps": ["host2:2222"]}, "task": {"type": "worker", "index": 0}}\''
)


@dataclasses.dataclass(frozen=True)
class ServerTask:
    """One process of a cluster.

    Attributes:
        cluster: Addresses, as "host:port", by role: "chief", "worker" and "ps".
        role: Role of this process.
        index: Index of this process among those of its role.
    """

    cluster: dict[str, list[str]]
    role: str
    index: int

    @property
    def address(self) -> str:
        """Address of this process, as "host:port"."""
        return self.cluster[self.role][self.index]

    @property
    def name(self) -> str:
        """Name of this task in messages, such as "worker 0"."""
        return name_of(self.role, self.index)

    @property
    def others(self) -> list[tuple[str, int]]:
        """Role and index of every worker and server."""
        return [(role, i) for role in (WORKER, SERVER) for i in range(len(self.cluster[role]))]


def name_of(role: str, index: int) -> str:
    """Returns the name of a task in messages."""
    return {CHIEF: "the chief", WORKER: f"worker {index}"}.get(role, f"parameter server {index}")


def task_from_environment() -> ServerTask:
    """Reads this process's task from `TF_CONFIG`.

    Raises:
        ValueError: If it is not set, is not JSON, or does not describe a cluster with one chief,
            workers and servers at distinct addresses, and one of its tasks.
    """
    text = topology.setting("TF_CONFIG")
    if not text:
        raise ValueError(
            f"`TF_CONFIG` must describe the cluster and this process's task. Received: nothing. "
            f"Set it, as in {_EXAMPLE}, or start the job with `tfdml launch --workers 2 --ps 2`."
        )
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"`TF_CONFIG` must be JSON. Received: {text[:200]!r}: {error}. Write it as in "
            f"{_EXAMPLE}."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"`TF_CONFIG` must be a JSON object, as in {_EXAMPLE}. Received: {text}.")
    task = config.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        raise ValueError(
            f"`TF_CONFIG` must have a task with a type and an index. Received: task={task!r}. "
            f"Write it as in {_EXAMPLE}."
        )
    return checked_task(config.get("cluster"), task["type"], task["index"])


def checked_task(cluster: Any, role: Any, index: Any) -> ServerTask:
    """Validates the description of a cluster and of one of its tasks.

    Args:
        cluster: Addresses by role.
        role: Role of this process.
        index: Index of this process among those of its role: a number or a string of digits.

    Raises:
        ValueError: If the cluster or the task is invalid; see `task_from_environment`.
    """
    if not isinstance(cluster, dict) or not all(
        isinstance(tasks, list) and all(isinstance(a, str) for a in tasks)
        for tasks in cluster.values()
    ):
        raise ValueError(
            f"The cluster must name lists of addresses by role. Received: cluster={cluster!r}. "
            f"Write it as in {_EXAMPLE}."
        )
    missing = [job for job in _ROLES if not cluster.get(job)]
    if missing:
        raise ValueError(
            f"The cluster must have a chief, workers and parameter servers. Received: no "
            f"{' and no '.join(missing)} in {cluster}. Add them, as in {_EXAMPLE}, or start the "
            f"job with `tfdml launch --workers 2 --ps 2`. For workers alone use "
            f"`tfdml.MultiWorkerMirroredStrategy`."
        )
    unknown = sorted(set(cluster) - set(_ROLES))
    if unknown:
        raise ValueError(
            f"The cluster's roles must be among chief, worker and ps. Received: {unknown}. Leave "
            f"them out: evaluation runs on the workers."
        )
    if len(cluster[CHIEF]) != 1:
        raise ValueError(
            f"The cluster must have one chief, which runs the script. Received: {cluster[CHIEF]}."
        )
    _check_addresses(cluster)
    if role not in _ROLES:
        raise ValueError(
            f"The task's type must be chief, worker or ps. Received: type={role!r}, "
            f"index={index!r}. Write it as in {_EXAMPLE}."
        )
    number = int(index) if str(index).isdecimal() else -1
    if not 0 <= number < len(cluster[role]):
        raise ValueError(
            f"The task's index must be from 0 to {len(cluster[role]) - 1} for a {role}. Received: "
            f"index={index!r} in {cluster}."
        )
    return ServerTask({job: list(cluster[job]) for job in _ROLES}, role, number)


def _check_addresses(cluster: dict[str, list[str]]) -> None:
    seen: dict[str, str] = {}
    for role in _ROLES:
        for index, address in enumerate(cluster[role]):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"An address must be host:port. Received: {address!r} for "
                    f"{name_of(role, index)}."
                )
            if address in seen:
                raise ValueError(
                    f"Every task must have a different port on its host. Received: {address} for "
                    f"{seen[address]} and for {name_of(role, index)}. Change one of the ports."
                )
            seen[address] = name_of(role, index)
