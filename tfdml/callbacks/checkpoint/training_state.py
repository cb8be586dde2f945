"""The whole state of a training at one moment, and its restoration."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdml.callbacks.checkpoint import random_state
from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.model_state import ModelState
from tfdml.checkpointing import Files
from tfdml.checkpointing.names import DEALT, PART
from tfdml.checkpointing.stored_tables import StoredTables
from tfdml.strategies.keras_seam.data.data_position import DataPosition
from tfdml.strategies.keras_seam.pipeline.placing import restore_cut, saved_cut
from tfdml.strategies.parameter_server.server_tables import ServerTables
from tfdml.strategies.replicas.rank_state import RankState


@dataclasses.dataclass(frozen=True)
class OwnState:
    """State that belongs to one rank.

    Attributes:
        tensors: Arrays by name: the rank's state between steps, its random generators, its
            callbacks.
        notes: Data for JSON.
    """

    tensors: dict[str, np.ndarray]
    notes: dict[str, Any]

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """The rank's parts of variables that are divided among the ranks, by name."""
        return _below(PART, self.tensors)

    def without_parts(self) -> "OwnState":
        """Returns the state without the rank's parts of divided variables."""
        tensors = {name: v for name, v in self.tensors.items() if not name.startswith(PART)}
        return dataclasses.replace(self, tensors=tensors)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """State of a training at one moment, as seen by one rank.

    Attributes:
        shared: Data for JSON that is the same on all ranks.
        tensors: Arrays by name that are the same on all ranks, and no longer change.
        own: State that belongs to this rank.
    """

    shared: dict[str, Any]
    tensors: dict[str, np.ndarray]
    own: OwnState


class TrainingState:
    """State of a `fit`: of its model, callbacks, data, ranks and random generators.

    Args:
        model: The model, built and compiled.
        callbacks: State of the other callbacks of `fit`.
        data: Position in the training data.
        ranks: State of this rank.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: CallbackState,
        data: DataPosition,
        ranks: RankState,
    ):
        self._model, self._data, self._ranks = model, data, ranks
        self._model_state = ModelState(model)
        self._callback_state = callbacks
        self._layout = self._model_state.layout()

    def leave_tables_to_servers(
        self, files: Files, directory: str, say: Callable[[str], None]
    ) -> ServerTables | None:
        """See `ModelState.leave_tables_to_servers`: these tables are in no snapshot."""
        return self._model_state.leave_tables_to_servers(files, directory, say)

    def read(self, step: int) -> Snapshot:
        """Returns the current state.

        Args:
            step: The number of the epoch's batches that have been used; 0 between epochs.
        """
        self._ranks.wait_for_steps()
        callbacks, arrays = self._callback_state.read()
        notes, random = random_state.read()
        shared = {
            "step": step,
            "data": self._data.state(step),
            "layout": self._layout,
            "stopped": bool(self._model.stop_training),
            "batch_split": self._ranks.batch_split,
            "local_updates": self._ranks.local_updates,
            "cut": saved_cut(self._model),
        }
        ranks = {f"kept/{name}": value for name, value in self._ranks.local_state().items()}
        parts = {f"{PART}{name}": value for name, value in self._model_state.read_parts().items()}
        # Callbacks may have different state on each rank.
        shared["divided_tables"] = any(name.endswith(DEALT) for name in parts)
        own = OwnState(
            {**random, **ranks, **parts, **arrays}, {"random": notes, "callbacks": callbacks}
        )
        return Snapshot(shared, self._model_state.read(), own)

    def check(self, shared: dict[str, Any], path: str, accepts: bool) -> list[str]:
        """Checks that a state belongs to this model and optimizer; see `ModelState.check`.

        Returns:
            The accepted differences, those of the data included, in words.
        """
        self._callback_state.accepts_changes = accepts
        return [*self._model_state.check(shared["layout"], path, accepts), *self._data.changes]

    @property
    def data_changed(self) -> bool:
        """Whether the data differ from those of the state, and that was accepted."""
        return bool(self._data.changes)

    def restore(
        self,
        shared: dict[str, Any],
        tensors: dict[str, np.ndarray],
        own: Sequence[OwnState],
        parts: Sequence[Mapping[str, np.ndarray]] | None = None,
        tables: StoredTables | None = None,
    ) -> None:
        """Restores a state.

        Args:
            shared: A snapshot's `shared`.
            tensors: A snapshot's `tensors`.
            own: State of each rank at the time, in rank order, for any number of ranks.
            parts: Each rank's parts of the variables that were divided among the ranks of that
                time, which all present ranks ask for in the same order; by default those in `own`.
            tables: The tables that parameter servers have saved.
        """
        if parts is None:
            parts = [o.parts for o in own]
        # Earlier checkpoints do not have it.
        restore_cut(self._model, shared.get("cut"))
        self._model_state.restore(tensors, parts, tables)
        kept = [_below("kept/", o.tensors) for o in own]
        has_slots = not self._model_state.has_other_optimizers
        self._ranks.restore(kept, shared.get("local_updates"), has_slots)
        # Earlier checkpoints do not have it.
        self._ranks.restore_batch_split(shared.get("batch_split"))
        mine = own[self._ranks.rank % len(own)]
        self._callback_state.restore(mine.notes["callbacks"], mine.tensors)
        random_state.restore(mine.notes["random"], mine.tensors)


def _below(prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays whose names have a prefix, by the rest of the name."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
