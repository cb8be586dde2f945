"""Rules that give the number of local steps until the next synchronization."""

import abc
import dataclasses
import math
from typing import NamedTuple


class LastRound(NamedTuple):
    """Measurements and settings of the last round, the same on all ranks.

    Attributes:
        sync_every: Steps between synchronizations so far.
        learning_rate: The inner learning rate of rank 0.
        step_seconds: Mean seconds of a local step on the slowest rank; 0 if not measured.
        exchange_seconds: Seconds of the synchronization's exchange after the last rank arrived; 0
            if not measured.
    """

    sync_every: int
    learning_rate: float
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0


class SyncRule(abc.ABC):
    """Base class of rules that choose the steps between two synchronizations."""

    @abc.abstractmethod
    def next_interval(self, last: LastRound) -> int:
        """Returns the number of local steps until the next synchronization, at least 1.

        Args:
            last: Measurements and settings of the last round.
        """


@dataclasses.dataclass(frozen=True)
class FixedSyncRule(SyncRule):
    """Rule by which all synchronizations are the same number of steps apart.

    Attributes:
        steps: The number of steps.
    """

    steps: int

    def next_interval(self, last: LastRound) -> int:
        """Returns the number of steps; see `SyncRule`."""
        return self.steps


@dataclasses.dataclass(frozen=True)
class QuadraticSyncRule(SyncRule):
    """Rule by which steps between synchronizations grow as the learning rate falls.

    Their number is `max(min_steps, floor((alpha / learning_rate) ** 2))`, at most `max_steps`.

    Args:
        alpha: Growth coefficient: the learning rate at which ranks would synchronize at every step.
            Larger values synchronize less often.
        min_steps: The least number of steps.
        max_steps: The largest number of steps, which also holds while a learning rate that begins
            at 0 rises.

    Raises:
        ValueError: If an argument is not positive, or `max_steps` is less than `min_steps`.

    Reference:
        Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning",
        arXiv:2310.14423.
    """

    alpha: float
    min_steps: int = 4
    max_steps: int = 1000

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha < math.inf:
            raise ValueError(f"`alpha` must be a positive number. Received: alpha={self.alpha!r}.")
        if type(self.min_steps) is not int or self.min_steps < 1:
            raise ValueError(
                f"`min_steps` must be a positive integer. Received: min_steps={self.min_steps!r}."
            )
        if type(self.max_steps) is not int or self.max_steps < self.min_steps:
            raise ValueError(
                f"`max_steps` must be an integer of at least `min_steps`, {self.min_steps}. "
                f"Received: max_steps={self.max_steps!r}."
            )

    def next_interval(self, last: LastRound) -> int:
        """Returns the number of steps for the present learning rate; see `SyncRule`."""
        if last.learning_rate <= 0:
            return self.min_steps
        # Rates are float32 numbers: 0.1 is a little more than that.
        ratio = self.alpha / last.learning_rate * (1 + 1e-6)
        return min(self.max_steps, max(self.min_steps, int(ratio**2)))


@dataclasses.dataclass(frozen=True)
class LinkSyncRule(SyncRule):
    """Rule that measures the link, and synchronizes so seldom that it takes little of the time.

    `sync_every="auto"` is this rule with its defaults. Rank 0's link and the slowest rank's steps
    are measured in every round, and the steps until the next synchronization follow from them.

    Args:
        max_fraction: Fraction of the time that synchronizations may take, above 0 and below 1.
        max_steps: The largest number of steps between synchronizations.

    Raises:
        ValueError: If an argument is out of range.
    """

    max_fraction: float = 0.1
    max_steps: int = 1000

    def __post_init__(self) -> None:
        if not isinstance(self.max_fraction, int | float) or not 0 < self.max_fraction < 1:
            raise ValueError(
                f"`max_fraction` must be a fraction of the time, above 0 and below 1. Received: "
                f"max_fraction={self.max_fraction!r}."
            )
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ValueError(
                f"`max_steps` must be a positive integer. Received: max_steps={self.max_steps!r}."
            )

    def next_interval(self, last: LastRound) -> int:
        """Returns the number of steps for the measured times; see `SyncRule`."""
        if not last.step_seconds:
            return last.sync_every
        busy = last.exchange_seconds * (1 - self.max_fraction) / self.max_fraction
        return min(self.max_steps, max(1, math.ceil(busy / last.step_seconds)))


def get_rule(sync_every: int | str | SyncRule) -> SyncRule:
    """Returns the rule that the argument `sync_every` describes.

    Raises:
        ValueError: If it is not a positive integer, "auto" or a rule.
    """
    if isinstance(sync_every, SyncRule):
        return sync_every
    if isinstance(sync_every, str) and sync_every == "auto":
        return LinkSyncRule()
    if type(sync_every) is not int or sync_every < 1:
        raise ValueError(
            f"`sync_every` must be a positive number of steps, 'auto', or a rule such as "
            f"`tfdml.local_updates.QuadraticSyncRule(alpha=0.02)`. Received: "
            f"sync_every={sync_every!r}."
        )
    return FixedSyncRule(sync_every)
