"""This process's rank among the job's processes; the only module that reads the environment."""

import dataclasses
import json
import os
from collections.abc import Mapping

# Each launcher sets variables of its own, here in the order rank, size, local rank, local size. The
# first launcher whose rank is set is used.
_LAUNCHERS = {
    "horovodrun (gloo)": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
    "mpirun (Open MPI)": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun (MPICH, Intel MPI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

# Set by `tfdml launch`, because TF_CONFIG does not say which workers share a host.
_LOCAL_RANK, _LOCAL_SIZE = "TFDML_LOCAL_RANK", "TFDML_LOCAL_SIZE"

# Set by `tfdml launch --job-dir`, for reports on the job.
_JOB_DIRECTORY = "TFDML_JOB_DIRECTORY"


@dataclasses.dataclass(frozen=True)
class Topology:
    """This process's rank in the job and on its host.

    Attributes:
        rank: Index of this process, from 0 to `size - 1`.
        size: The number of processes of the job.
        local_rank: Index of this process among those of the same host.
        local_size: The number of processes on this host.
        launcher: The launcher that set these values; None if no launcher started the process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str | None = None

    def __post_init__(self) -> None:
        for index, count in (("rank", "size"), ("local_rank", "local_size")):
            i, n = getattr(self, index), getattr(self, count)
            if n < 1 or not 0 <= i < n:
                raise ValueError(
                    f"`{index}` must be from 0 to `{count}` - 1. Received: {index}={i}, "
                    f"{count}={n} (from {self.launcher or 'the caller'})."
                )

    @property
    def is_chief(self) -> bool:
        """Whether this process acts for the job: progress bar, files, messages."""
        return self.rank == 0


def launched(environment: Mapping[str, str] | None = None) -> Topology:
    """Reads this process's topology from the environment variables of its launcher.

    Args:
        environment: The variables to read; those of this process by default.

    Returns:
        The topology; that of a single process if no launcher is recognised.

    Raises:
        ValueError: If a launcher's variables are incomplete, are not integers, or contradict
            each other.
    """
    environment = os.environ if environment is None else environment
    for launcher, names in _LAUNCHERS.items():
        if names[0] in environment:
            return Topology(*(_integer(environment, n, launcher) for n in names), launcher=launcher)
    return Topology()


def started_together(environment: Mapping[str, str] | None = None) -> Topology:
    """Reads this process's rank among the processes started to train together, by any launcher.

    Unlike `launched` it supports the workers of `TF_CONFIG`, and ignores the variables of MPICH,
    because Slurm's `srun` sets them for any program.

    Args:
        environment: The variables to read; those of this process by default.

    Returns:
        The topology, possibly that of a single process.
    """
    environment = os.environ if environment is None else environment
    for launcher in ("horovodrun (gloo)", "mpirun (Open MPI)"):
        if _LAUNCHERS[launcher][0] in environment:
            return launched(environment)
    cluster, task, index = _tf_config(environment)
    order = [(j, i) for j in ("chief", "master", "worker") for i in range(len(cluster.get(j, ())))]
    # With parameter servers, the chief alone runs the training; an evaluator does not train.
    if "ps" in cluster or (task, index) not in order:
        return Topology()
    return Topology(order.index((task, index)), len(order), launcher="TF_CONFIG")


def is_chief_of_servers(environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether `TF_CONFIG` makes this process the chief of workers and parameter servers.

    Args:
        environment: The variables to read; those of this process by default.
    """
    cluster, task, _ = _tf_config(os.environ if environment is None else environment)
    return task == "chief" and {"worker", "ps"} <= cluster.keys()


def on_this_host(environment: Mapping[str, str] | None = None) -> Topology:
    """Reads this process's rank among the workers that `tfdml launch` started on this host.

    Args:
        environment: The variables to read; those of this process by default.

    Returns:
        The topology, in which `rank` and `size` are the local ones; that of a single process if
        `tfdml launch` did not start it.

    Raises:
        ValueError: If the variables are incomplete, are not integers, or contradict each other.
    """
    environment = os.environ if environment is None else environment
    names = (_LOCAL_RANK, _LOCAL_SIZE)
    if not any(name in environment for name in names):
        return Topology()
    rank, size = (_integer(environment, name, "tfdml launch") for name in names)
    return Topology(rank, size, rank, size, launcher="tfdml launch")


def is_first_on_host(environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether this process acts for its host: each one does if no launcher says more.

    Args:
        environment: The variables to read; those of this process by default.
    """
    return started_together(environment).local_rank == on_this_host(environment).local_rank == 0


def local_variables(local_rank: int, local_size: int) -> dict[str, str]:
    """Returns the variables by which `tfdml launch` gives a worker its rank on its host.

    Args:
        local_rank: Index of the worker among those of its host.
        local_size: The number of workers on the host.
    """
    return {_LOCAL_RANK: str(local_rank), _LOCAL_SIZE: str(local_size)}


def job_directory(environment: Mapping[str, str] | None = None) -> str:
    """Returns the directory for reports on the job that its launcher has chosen; "" if it has not.

    Args:
        environment: The variables to read; those of this process by default.
    """
    environment = os.environ if environment is None else environment
    return environment.get(_JOB_DIRECTORY, "")


def job_variables(directory: str) -> dict[str, str]:
    """Returns the variables by which a launcher gives all ranks the directory for reports.

    Args:
        directory: Absolute path of the directory; "" if the ranks choose one.
    """
    return {_JOB_DIRECTORY: directory} if directory else {}


def own_host(environment: Mapping[str, str] | None = None) -> str | None:
    """Returns the name or address at which the launcher lets other processes reach this one.

    A machine may have more addresses, in networks that the job must not use.

    Args:
        environment: The variables to read; those of this process by default.
    """
    environment = os.environ if environment is None else environment
    cluster, task, index = _tf_config(environment)
    try:
        return cluster[task][index].rpartition(":")[0].strip("[]") or None
    except (KeyError, IndexError, AttributeError):
        return environment.get("HOROVOD_HOSTNAME")


def _tf_config(environment: Mapping[str, str]) -> tuple[dict, str | None, int]:
    """Returns `TF_CONFIG`'s cluster and this process's task; empty values if it is invalid."""
    try:
        config = json.loads(environment.get("TF_CONFIG") or "{}")
        task = config.get("task", {})
        return dict(config.get("cluster", {})), task.get("type"), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError):
        return {}, None, 0  # Code that needs `TF_CONFIG` reports what is wrong with it.


def is_launched() -> bool:
    """Returns whether a launcher has started this process as one of several."""
    return is_elastic() or any(names[0] in os.environ for names in _LAUNCHERS.values())


def is_elastic() -> bool:
    """Returns whether the launcher lets processes join and leave (`horovodrun --min-np`)."""
    return setting("HOROVOD_ELASTIC") == "1"


def child_environment(**changes: str) -> dict[str, str]:
    """Returns a copy of this process's environment, with `changes`, for a child process."""
    return {**os.environ, **changes}


def setting(name: str, default: str = "") -> str:
    """Returns the environment variable `name`, or `default` if it is not set."""
    return os.environ.get(name, default)


def set_default(name: str, value: str) -> None:
    """Sets the environment variable `name` of this process and its children, unless it is set."""
    os.environ.setdefault(name, value)


def change_environment(changes: Mapping[str, str | None]) -> None:
    """Sets environment variables of this process and its children; None removes one."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _integer(environment: Mapping[str, str], name: str, launcher: str) -> int:
    value = environment.get(name)
    if value is None or not value.strip().isdecimal():
        raise ValueError(
            f"`{name}` must be a non-negative integer, because {launcher} seems to have started "
            f"this process. Received: {name}={value!r}. Start all processes with one launcher, or "
            f"unset its variables to run on one process."
        )
    return int(value)
