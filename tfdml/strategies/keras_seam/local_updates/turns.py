"""Turns of a model's fragments: which ones are due after how many local steps."""

from collections.abc import Mapping, Sequence
from typing import Any


class Turns:
    """Counts local steps, and tells which fragments must be synchronized.

    All ranks count the same steps, so all find the same fragments due, without an exchange.

    Args:
        fragments: Number of fragments.

    Attributes:
        sync_every: Steps between two synchronizations of a fragment now; 0 before the first round.
        since: Steps since the last synchronization of any fragment.
    """

    def __init__(self, fragments: int):
        self.sync_every, self.since = 0, 0
        # Of each fragment since its last synchronization: the steps that count for its next one,
        # and those that were taken.
        self._counted = [0] * fragments
        self._taken = [0] * fragments

    def start(self) -> None:
        """Begins to count anew, as if later fragments had taken some steps: so they alternate."""
        count = len(self._counted)
        self._counted = [self.sync_every * i // count for i in range(count)]

    def add(self, steps: int) -> None:
        """Counts steps that were taken."""
        self.since += steps
        self._counted = [own + steps for own in self._counted]
        self._taken = [own + steps for own in self._taken]

    @property
    def due(self) -> list[int]:
        """Numbers of the fragments that must be synchronized now."""
        return [i for i, own in enumerate(self._counted) if own >= self.sync_every]

    @property
    def changed(self) -> list[int]:
        """Numbers of the fragments that have taken a step since their synchronization."""
        return [i for i, taken in enumerate(self._taken) if taken]

    def end(self, numbers: Sequence[int]) -> None:
        """Counts the steps of fragments that were synchronized from 0 again."""
        self.since = 0
        for number in numbers:
            self._counted[number] = self._taken[number] = 0

    @property
    def notes(self) -> dict[str, Any]:
        """The counts after a synchronization, for JSON."""
        return {"sync_every": self.sync_every, "steps": self._counted, "taken": self._taken}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restores what `notes` returned, for as many fragments."""
        self.sync_every, self.since = notes["sync_every"], 0
        self._counted, self._taken = list(notes["steps"]), list(notes["taken"])
