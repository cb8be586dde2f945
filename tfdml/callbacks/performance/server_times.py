"""Times of the workers of parameter servers since an epoch began, from the chief's clock."""

import dataclasses
from collections.abc import Sequence

from tfdml.callbacks.performance.job_times import RankSums, causes_of
from tfdml.strategies.observers.step_clock import StepSums
from tfdml.strategies.parameter_server.strategy import ParameterServerStrategy


class ServerTimes:
    """Reader of the chief's clock, in which each worker is a rank.

    Args:
        strategy: The strategy.

    Attributes:
        hosts: Each worker's host.
    """

    def __init__(self, strategy: ParameterServerStrategy):
        self._strategy, self._clock = strategy, strategy.worker_clock
        self._before = self._clock.read()
        tasks = strategy.connection.task.cluster["worker"]
        self.hosts = [address.rpartition(":")[0] for address in tasks]

    def begin_fit(self) -> None:
        """Counts the next step apart, because it may be traced."""
        self._clock.skip()

    def begin_epoch(self) -> None:
        """Begins the sums."""
        self._clock.begin_epoch()
        self._before = self._clock.read()

    @property
    def steps(self) -> int:
        """The number of steps since the epoch began; a synchronous one is one for all workers."""
        pairs = zip(self._clock.read(), self._before, strict=True)
        steps = [now.steps - before.steps for now, before in pairs]
        return max(steps) if self._strategy.synchronous else sum(steps)

    def so_far(self) -> dict[int, StepSums]:
        """Returns the sums over all steps so far of all workers."""
        return {rank: self._known(own.sums) for rank, own in enumerate(self._clock.read())}

    def gather(self, extra: Sequence[float] = ()) -> tuple[list[RankSums], list[list[float]]]:
        """Returns the workers' sums since the epoch began, and the chief's further numbers.

        Args:
            extra: Further numbers of the chief.
        """
        pairs = zip(self._clock.read(), self._before, strict=True)
        sums = [self._known(now.since(before)) for now, before in pairs]
        causes, shares = causes_of(sums[0]), self._strategy.batch_split.fractions
        if not self._strategy.synchronous:
            rows = max(sum(own.rows for own in sums), 1)
            causes, shares = [None] * len(sums), [own.rows / rows for own in sums]
        times = [
            RankSums(rank, self.hosts[rank], shares[rank], own, causes[rank])
            for rank, own in enumerate(sums)
        ]
        return times, [list(extra)]

    def _known(self, sums: StepSums) -> StepSums:
        """Returns a worker's sums without what cannot be known.

        Asynchronous steps of different workers overlap, and each worker reads its own data in them.
        """
        if self._strategy.synchronous:
            return sums
        return dataclasses.replace(sums, exchange=None, wait=None, data_wait=None)
