"""`ReportCheckpointCallback`: what Ray Train learns of a `fit`, and how it continues."""

import datetime
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
from ray.train.v2._internal.execution.context import get_train_context

from tfdml.callbacks import FaultTolerantCheckpoint

# Directory of the checkpoints in the run's storage.
DIRECTORY = "fault_tolerant"


class ReportCheckpointCallback(FaultTolerantCheckpoint):
    """Reports each epoch's metrics to Ray Train, with the model, and makes `fit` resume.

    - **Report**: after each epoch all ranks report the logs, as Ray requires; rank 0's report has
      the model as a file `model.keras`, which is `Result.checkpoint` in the driver.
    - **Resume**: it is a `FaultTolerantCheckpoint` in the run's storage. If Ray starts the workers
      again, as many or not, training continues within the epoch.
    - **Preemption**: if Ray announces that a node is about to go, all ranks save after the same
      step. They train on until Ray starts them again, on other nodes.

    Args:
        save_freq: When to save for resuming: "epoch", a number of steps, or a `datetime.timedelta`.
        directory: Directory of what is saved for resuming, which all nodes reach, a path or a URL;
            by default in the run's storage.
        attach_model: Whether reports have the model.
        **options: Other arguments of `FaultTolerantCheckpoint`.

    Raises:
        ValueError: If the run's storage is not a path and `directory` is not given.
    """

    def __init__(
        self,
        save_freq: str | int | datetime.timedelta = "epoch",
        *,
        directory: str | os.PathLike | None = None,
        attach_model: bool = True,
        **options: Any,
    ):
        options = {"on_preemption": _is_announced, **options}
        super().__init__(directory or _run_directory(), save_freq, **options)
        self._attach_model = attach_model

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports to Ray, then saves as `FaultTolerantCheckpoint` does."""
        metrics = {k: float(v) for k, v in (logs or {}).items() if np.ndim(v) == 0}
        with tempfile.TemporaryDirectory() as folder:
            if self._attach_model:
                # All ranks call it, because each may have a part of the model.
                self.model.save(Path(folder, "model.keras"))
            attached = self._attach_model and ray.train.get_context().get_world_rank() == 0
            model = ray.train.Checkpoint.from_directory(folder) if attached else None
            ray.train.report({"epoch": epoch + 1, **metrics}, checkpoint=model)
        super().on_epoch_end(epoch, logs)

    def leave(self) -> None:
        """Continues after the save: Ray itself ends the workers, and charges no failure for it."""
        self.forget_preemption()


def _run_directory() -> str:
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ValueError(
            f"`directory` must be given if the run's storage is not a path, as a URL for fsspec, "
            f"such as 's3://bucket/run1'. Received: directory=None, with the storage "
            f"{storage.storage_filesystem.type_name!r}, {storage.experiment_fs_path}."
        )
    return str(Path(storage.experiment_fs_path, DIRECTORY))


def _is_announced() -> bool:
    """Returns whether Ray has told this worker that a node of the run is about to go.

    `ray.train.get_preemption_info` asks all workers at once, so a thread may not call it.
    """
    return get_train_context().preemption_context.preemption_info is not None
