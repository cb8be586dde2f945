"""Which of some candidates is the fastest: predicted first, and then tried."""

from collections.abc import Sequence

# A candidate that is predicted to take this many times as long as the best is not tried.
_DOUBT = 2.0
# What compresses must be faster than what does not by this part, to be preferred.
_MARGIN = 0.02
# A change of the steps' time by this part, so many times in a row, begins the trials anew. If they
# come out as before, it takes twice as many the next time: where steps differ by themselves, trials
# must not eat up what they gain.
_CHANGE, _PATIENCE = 0.25, 2


class Choice:
    """Chooses among candidates by the time of whole steps.

    It begins with the candidate that is predicted to be the fastest. Then it tries others: those
    near in the prediction, and not compressing at all, as long as what they send leaves a chance.
    When the steps' time changes later, all are tried again. What it does follows from what it is
    told alone, so that all ranks that are told the same do the same.

    Args:
        names: The candidates' names; the first one does not compress.
        predicted: Seconds of each one's exchange.
        least: Seconds that each one's bytes need on the wire: no step can be shorter.
    """

    def __init__(self, names: Sequence[str], predicted: Sequence[float], least: Sequence[float]):
        self.names, self.predicted = list(names), list(predicted)
        self._least = list(least)
        self._order = sorted(range(len(names)), key=lambda i: self.predicted[i])
        self.current = self._order[0]
        self.measured: dict[int, float] = {}
        self._settled: float | None = None
        self._before: int | None = None
        self._odd, self._patience = 0, _PATIENCE

    @property
    def settled(self) -> bool:
        """Whether no trial is under way."""
        return self._settled is not None

    def after(self, seconds: float) -> bool:
        """Takes the time of a step with `current`, and chooses what is next.

        Args:
            seconds: The median of some steps, the same on all ranks.

        Returns:
            Whether trials have just come to an end.
        """
        if self._settled is not None:
            self._watch(seconds)
            return False
        self.measured[self.current] = seconds
        untried = [i for i in self._order if i not in self.measured and self._may_win(i)]
        if untried:
            self.current = untried[0]
            return False
        self.current = self._fastest()
        self._settled = self.measured[self.current]
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
        changed = abs(seconds - self._settled) > _CHANGE * self._settled
        self._odd = self._odd + 1 if changed else 0
        if self._odd < self._patience:
            return
        # The link or the load is another one: what was predicted of it is void.
        self._settled, self._odd, self._before = None, 0, self.current
        self._least = [0.0] * len(self.names)
        self.predicted = [0.0] * len(self.names)
        self.measured = {self.current: seconds}
        self.current = next(i for i in self._order if i != self.current)
