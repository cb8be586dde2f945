"""Devices covered by a report, and functions that start jobs on them."""

import dataclasses
import functools
from typing import Any

from tfdml.horovod_build.loaded import Loaded, load
from tools.bench import harness

# Logical CPUs that stand in for devices in a report on CPUs.
LOGICAL_CPUS = 2
# Seconds until a job is ended.
LIMIT = 600.0


@dataclasses.dataclass(frozen=True, eq=False)
class Machine:
    """Devices covered by the report.

    Attributes:
        kind: "cpu" or "gpu".
        look: Report of `tools.gpu_checks.jobs.look`.
    """

    kind: str
    look: dict

    @property
    def cards(self) -> int:
        """Number of GPUs, or of logical CPUs instead."""
        return len(self.look["devices"]) if self.kind == "gpu" else LOGICAL_CPUS

    @property
    def has_gpu(self) -> bool:
        """True if the devices are GPUs and at least one exists."""
        return self.kind == "gpu" and self.cards > 0

    def alone(self, module: str, *arguments: str) -> Any:
        """Runs a job of one process; returns what it reports."""
        command = harness.module_command(
            f"tools.gpu_checks.jobs.{module}", *self._with_kind(arguments)
        )
        return harness.result_of(command, harness.environment(harness.threads_each(1)), LIMIT)

    def ranks(self, module: str, *arguments: str, processes: int = 2) -> Any:
        """Runs a job of Horovod; returns what rank 0 reports."""
        name = f"tools.gpu_checks.jobs.{module}"
        return harness.run_job(
            name, *self._with_kind(arguments), processes=processes, timeout=LIMIT
        )

    def workers(self, module: str, *arguments: str, workers: int = 2) -> Any:
        """Runs a job of `tfdml launch` on this machine; returns what worker 0 reports."""
        launch = harness.module_command("tfdml.cli.main", "launch", "--workers", str(workers))
        command = [
            *launch,
            "--",
            "-m",
            f"tools.gpu_checks.jobs.{module}",
            *self._with_kind(arguments),
        ]
        own = harness.environment(harness.threads_each(workers))
        return harness.result_of(command, own, LIMIT)

    @functools.cached_property
    def horovod(self) -> Loaded | str:
        """Properties of the installed Horovod, or the reason why it does not load."""
        return load()

    @property
    def has_nccl_in_horovod(self) -> bool:
        """True if Horovod is built with NCCL."""
        return isinstance(self.horovod, Loaded) and "nccl" in self.horovod.transports

    def _with_kind(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        return (*arguments, "--kind", self.kind)


def look(kind: str) -> Machine:
    """Inspects this machine.

    Args:
        kind: "cpu", "gpu", or "auto" for GPUs if the machine has any.
    """
    if kind == "auto":
        found = look("gpu")
        return found if found.cards else look("cpu")
    return Machine(kind, Machine(kind, {}).alone("look"))
