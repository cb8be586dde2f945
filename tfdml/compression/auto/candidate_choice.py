"""Selection of the fastest of several candidates: first by prediction, then by trial."""

from collections.abc import Sequence

# A candidate whose predicted time exceeds the best one's by this factor is not tried.
_DOUBT = 2.0
# Compression must be faster than no compression by this fraction to be preferred.
_MARGIN = 0.02
# The trials start over when the step time has changed by this fraction in this many consecutive
# measurements. If they choose the same candidate again, twice as many are required the next time:
# where step times vary by themselves, trials must not cost more than they gain.
_CHANGE, _PATIENCE = 0.25, 2


class CandidateChoice:
    """Chooses among candidates by the time of whole steps.

    It begins with the candidate that is predicted to be the fastest. Then it tries the candidates
    predicted to be nearly as fast, and no compression, unless the bytes alone take longer than the
    best measured step. When the step time changes later, all are tried again. The choice depends on
    nothing but the arguments and the reported times, so ranks with the same inputs choose the same.

    Args:
        names: The candidates' names; the first one is no compression.
        predicted: Predicted seconds of each candidate's exchange.
        least: Seconds that each candidate's bytes need on the wire: no step can be shorter.
    """

    def __init__(self, names: Sequence[str], predicted: Sequence[float], least: Sequence[float]):
        self.names, self.predicted = list(names), list(predicted)
        self._least = list(least)
        self._order = sorted(range(len(names)), key=lambda i: self.predicted[i])
        self.current = self._order[0]
        self.measured: dict[int, float] = {}
        self._settled_seconds: float | None = None
        self._before: int | None = None
        self._deviations, self._patience = 0, _PATIENCE

    @property
    def settled(self) -> bool:
        """Whether no trial is in progress."""
        return self._settled_seconds is not None

    def after(self, seconds: float) -> bool:
        """Records the time of a step with `current` and chooses the next candidate.

        Args:
            seconds: The median of several steps, the same on all ranks.

        Returns:
            Whether the trials have just ended.
        """
        if self._settled_seconds is not None:
            self._watch(seconds)
            return False
        self.measured[self.current] = seconds
        untried = [i for i in self._order if i not in self.measured and self._may_win(i)]
        if untried:
            self.current = untried[0]
            return False
        self.current = self._fastest()
        self._settled_seconds = self.measured[self.current]
        self._patience = 2 * self._patience if self.current == self._before else _PATIENCE
        return True

    def _may_win(self, candidate: int) -> bool:
        best = min(self.measured.values())
        if self._least[candidate] >= best:
            return False
        near = self.predicted[candidate] <= _DOUBT * self.predicted[self._order[0]]
        return near or candidate == 0

    def _fastest(self) -> int:
        best = min(self.measured, key=lambda i: self.measured[i])
        plain = self.measured.get(0)
        if plain is not None and plain * (1 - _MARGIN) <= self.measured[best]:
            return 0
        return best

    def _watch(self, seconds: float) -> None:
        changed = abs(seconds - self._settled_seconds) > _CHANGE * self._settled_seconds
        self._deviations = self._deviations + 1 if changed else 0
        if self._deviations < self._patience:
            return
        # The link or the load has changed, so the predictions no longer hold.
        self._settled_seconds, self._deviations, self._before = None, 0, self.current
        self._least = [0.0] * len(self.names)
        self.predicted = [0.0] * len(self.names)
        self.measured = {self.current: seconds}
        self.current = next(i for i in self._order if i != self.current)
