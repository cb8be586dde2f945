"""State of rounds in checkpoints: what is the same on all ranks, and what is each rank's own."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.replicas.earlier_ranks import restore_common, slot_copies
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
        return {**self._rounds.turns.notes, "groups": self._rounds.groups.by_rank}

    @property
    def own(self) -> dict[str, list[tf.Variable]]:
        """This rank's own variables, by name: the copies of each."""
        found, rounds = {}, self._rounds
        if not rounds.have_begun:
            return found
        found |= slot_copies(optimizers_of(self._model))
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

        For another number of ranks or devices, another method or another optimizer, slots become
        the means of those of all ranks, and all weights the last common ones.

        Args:
            notes: `notes` at that time.
            before: Each rank's `own` as arrays, in rank order, for any number of ranks.
        """
        rounds, count = self._rounds, len(self._rounds.fragments)
        ranks = rounds.collective
        # While warm-up goes on, all ranks have the same state.
        rounds.have_begun = any(before)
        mine, own = before[ranks.rank % len(before)], self.own
        is_same_job = (
            len(before) == ranks.size
            and notes["groups"] == self.notes["groups"]
            and len(notes["steps"]) == count
            and {name: v.shape for name, v in mine.items()}
            == {name: tuple(copies[0].shape) for name, copies in own.items()}
        )
        if is_same_job:
            for name, copies in own.items():
                for copy in copies:
                    copy.assign(mine[name])
        else:
            restore_common(self._model, optimizers_of(self._model), before)
            notes = {**notes, "steps": [0] * count, "taken": [0] * count}
        rounds.resume(notes)
