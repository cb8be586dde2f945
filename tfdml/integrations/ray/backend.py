"""Backend of Ray Train that makes its workers the ranks of a tfdml strategy."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import ray
from ray.train import BackendConfig
from ray.train.backend import Backend

from tfdml import topology
from tfdml.runtime.launch.horovod_rendezvous import HorovodRendezvous, interface_of
from tfdml.runtime.launch.supervisor import free_ports


@dataclasses.dataclass
class KerasConfig(BackendConfig):
    """Configuration of the workers of a `KerasTrainer`.

    Attributes:
        horovod: Whether the training function uses `HorovodStrategy`, instead of
            `MultiWorkerMirroredStrategy`.
    """

    horovod: bool = False

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that prepares the workers."""
        return KerasBackend


class KerasBackend(Backend):
    """Gives each worker its rank, whenever Ray has started a group of workers.

    Ray makes one for each class, in the process of the run's controller.
    """

    def __init__(self) -> None:
        self._rendezvous: HorovodRendezvous | None = None

    def on_start(self, worker_group: Any, backend_config: KerasConfig) -> None:
        """Sets the variables of a launcher on the workers, before TensorFlow is imported there."""
        self._stop()
        addresses = worker_group.execute(ray.util.get_node_ip_address)
        # Ray's ranks of a host follow each other.
        hosts = [(host, len(list(ranks))) for host, ranks in itertools.groupby(addresses)]
        if backend_config.horovod:
            self._rendezvous = HorovodRendezvous(hosts, ray.util.get_node_ip_address())
            variables = self._rendezvous.variables()
        else:
            variables = _cluster_variables(worker_group, hosts)
        ray.get(
            [
                worker_group.execute_single_async(rank, _enter, address, own)
                for rank, (address, own) in enumerate(zip(addresses, variables, strict=True))
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: KerasConfig) -> None:
        """Stops Horovod's rendezvous server."""
        self._stop()

    def _stop(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.stop()
            self._rendezvous = None


def _cluster_variables(worker_group: Any, hosts: Sequence[tuple[str, int]]) -> list[dict[str, str]]:
    """Returns the variables of each worker of a TensorFlow cluster."""
    workers: list[str] = []
    for host, count in hosts:
        # One worker finds the ports of all on its host, so that they differ.
        ports = worker_group.execute_single(len(workers), free_ports, count)
        workers += [f"{host}:{port}" for port in ports]
    tasks = [{"type": "worker", "index": rank} for rank in range(len(workers))]
    return [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})} for task in tasks
    ]


def _enter(address: str, variables: dict[str, str]) -> None:
    """Makes this worker a rank; Ray's examples and its own trainer switch Keras 3 off."""
    if "HOROVOD_RANK" in variables:
        variables = {**variables, "HOROVOD_GLOO_IFACE": interface_of(address)}
    topology.change_environment({**variables, "TF_USE_LEGACY_KERAS": None})
