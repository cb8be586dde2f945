"""The checkpoint from which a `fit` resumes: read once, restored once or twice."""

import os

import numpy as np

from tfdml.callbacks.checkpoint.directory_use import DirectoryUse
from tfdml.callbacks.checkpoint.training_state import OwnState, TrainingState
from tfdml.checkpointing import Checkpoint
from tfdml.checkpointing.manifest import read_manifest
from tfdml.checkpointing.names import DEALT, OWN


class SavedState:
    """A complete checkpoint in memory, with the parts of all ranks that wrote it.

    Tables that parameter servers have saved stay in their files, from which the servers read them,
    and so do tables that were divided among ranks: a rank reads the rows that it has.

    Args:
        use: This process's use of the directory.
        name: The checkpoint's name in the directory.

    Attributes:
        path: The checkpoint's path.
        manifest: The checkpoint's manifest.
    """

    def __init__(self, use: DirectoryUse, name: str):
        if use.chaos:
            use.chaos.restore()
        self.path = os.path.join(use.path, name)
        self.manifest = read_manifest(use.files, self.path)
        checkpoint = Checkpoint(use.files, self.path, self.manifest)
        # Rank 0 has checked all files when it chose the checkpoint.
        self._parts = (
            checkpoint.read_all_but(lambda name: name.endswith(DEALT))
            if self.manifest.state.get("divided_tables")
            else checkpoint.read()
        )
        self._tables = checkpoint.tables()

    def restore(self, training: TrainingState) -> None:
        """Restores a training's state from it."""
        shared: dict[str, np.ndarray] = {}
        own = []
        for tensors, notes in self._parts:
            shared |= {k: v for k, v in tensors.items() if not k.startswith(OWN)}
            mine = {k.removeprefix(OWN): v for k, v in tensors.items() if k.startswith(OWN)}
            own.append(OwnState(mine, notes))
        training.restore(self.manifest.state, shared, own, tables=self._tables)
