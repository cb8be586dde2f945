"""State of rounds in checkpoints: what is the same on all ranks, and what is each rank's own."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.replicas.rank_state import optimizers_of
from tfdml.strategies.replicas.step_state import components

if TYPE_CHECKING:
    from tfdml.strategies.keras_seam.local_updates.rounds import Rounds


class SavedRounds:
    """Reads the state of a model's rounds after a synchronization, and restores it.

    Args:
        rounds: The rounds.
        model: The model.
        has_outer_state: Whether outer optimizers have state.
    """

    def __init__(self, rounds: "Rounds", model: keras.Model, has_outer_state: bool):
        self._rounds, self._model = rounds, model
        self._has_outer_state = has_outer_state

    @property
    def outer_optimizers(self) -> list[keras.Optimizer]:
        """The outer optimizers, which checkpoints save; that of `LocalSGD` has no state."""
        return [f.outer for f in self._rounds.fragments] if self._has_outer_state else []

    @property
    def notes(self) -> dict[str, Any]:
        """The state that is the same on all ranks, for JSON."""
        # Whether accumulated gradients are a mean over the rank's own rows.
        return {**self._rounds.turns.notes, "means": not self._rounds.is_warming_up}

    @property
    def own(self) -> dict[str, list[tf.Variable]]:
        """This rank's own variables, by name: the copies of each."""
        found, rounds = {}, self._rounds
        if rounds.slots_differ:
            for o, optimizer in enumerate(optimizers_of(self._model)):
                for i, variable in enumerate(optimizer.variables):
                    found[f"slots/{o}/{i}"] = components(variable)
        if len(rounds.fragments) > 1:
            found |= {name: [variable] for name, variable in rounds.rows.variables.items()}
            for f, fragment in enumerate(rounds.fragments):
                pairs = zip(fragment.anchors, fragment.weights, strict=True)
                for i, (anchor, weight) in enumerate(pairs):
                    found[f"anchors/{f}/{i}"] = components(anchor)
                    found[f"weights/{f}/{i}"] = components(weight)
        return found

    def restore(self, notes: Mapping[str, Any], before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the state.

        With another number of ranks, slots become the mean of those of all ranks, and all weights
        the last common ones.

        Args:
            notes: `notes` at that time.
            before: Each rank's `own` as arrays, in rank order, for any number of ranks.
        """
        rounds, collective = self._rounds, self._rounds.collective
        count = len(rounds.fragments)
        is_same_job = len(before) == collective.size and len(notes["steps"]) == count
        rounds.slots_differ = True
        mine = before[collective.rank % len(before)]
        for name, copies in self.own.items():
            values = [state[name] for state in before if name in state]
            if len(values) != len(before) or values[0].shape != tuple(copies[0].shape):
                continue
            value = mine[name] if is_same_job else _of_other_job(name, values, mine)
            for copy in copies:
                copy.assign(value)
        if not is_same_job:
            notes = {**notes, "steps": [0] * count, "taken": [0] * count}
        rounds.resume(notes)


def _of_other_job(
    name: str, values: Sequence[np.ndarray], mine: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Returns a variable's value for a job with another number of ranks.

    Args:
        name: The variable's name.
        values: Each rank's value.
        mine: All values of the rank in whose place this one comes.
    """
    kind, _, of = name.partition("/")
    if kind == "slots":
        return np.mean(values, 0) if values[0].dtype.kind == "f" else values[0]
    if kind == "weights":
        return mine[f"anchors/{of}"]
    return mine[name] if kind == "anchors" else np.zeros_like(mine[name])
