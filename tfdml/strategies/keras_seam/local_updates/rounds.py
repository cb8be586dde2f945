"""Rounds of local steps of a model's training, and the synchronizations that end them."""

from collections.abc import Mapping
from typing import Any

import keras

from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.local_updates import LocalUpdates
from tfdml.local_updates.sync_rules import FixedSyncRule, LastRound
from tfdml.strategies.aggregation.accumulation import accumulation_steps
from tfdml.strategies.keras_seam.local_updates.fragment import make_fragments
from tfdml.strategies.keras_seam.local_updates.rows import RoundRows
from tfdml.strategies.keras_seam.local_updates.saved_state import SavedRounds
from tfdml.strategies.keras_seam.local_updates.synchronizer import Synchronizer
from tfdml.strategies.keras_seam.local_updates.turns import Turns
from tfdml.strategies.keras_seam.step.optimizers import inner_of
from tfdml.strategies.observers.round_clock import RoundClock
from tfdml.strategies.observers.stop_vote import StopVote
from tfdml.strategies.replicas.rank_state import optimizers_of


class Rounds:
    """Rounds of local steps, each ended by a synchronization of one fragment or of all.

    Within a round each rank has weights, slots and metrics of its own. All methods are called
    between steps, by all ranks.

    Args:
        model: The model, built and compiled.
        method: The method of local updates.

    Attributes:
        fragments: The model's fragments, which are synchronized in turn.
        turns: Counts of steps, by which fragments are due.
        rows: Counts of rows, which local steps add to.
        clock: Clock of the rounds; None if their number of steps is fixed.
        saved: State for checkpoints.
        have_begun: Whether there was a local step: each rank may have slots of its own, and each
            fragment has its last common weights.
    """

    def __init__(self, model: keras.Model, method: LocalUpdates):
        self._model, self._method = model, method
        self._extended = model.distribute_strategy.extended
        self._weights = list(model.trainable_variables)
        self.fragments = make_fragments(model, method)
        self.turns = Turns(len(self.fragments))
        self.rows = RoundRows(self._extended, len(self.fragments))
        is_fixed = isinstance(method.rule, FixedSyncRule)
        self.clock = None if is_fixed else RoundClock(self.collective)
        self._synchronizer = Synchronizer(model, method, self.fragments, self.rows, self.clock)
        self.saved = SavedRounds(self, model, not method.is_plain_on_one_process)
        self._is_open = self.have_begun = False

    # -- Steps ---------------------------------------------------------------------------------

    @property
    def is_warming_up(self) -> bool:
        """Whether warm-up goes on: the next step is synchronous."""
        optimizers = [inner_of(optimizer) for optimizer in optimizers_of(self._model)]
        if not self._method.warmup_steps or not optimizers:
            return False
        # An update is synchronous or local, with all the steps whose gradients it has.
        steps = accumulation_steps(self._model) or 1
        least = -(-self._method.warmup_steps // steps) * steps
        return max(int(optimizer.iterations) for optimizer in optimizers) < least

    @property
    def groups(self) -> Hosts:
        """The ranks by the steps that they take together now: one group while warm-up goes on."""
        ranks = range(self.collective.size)
        return Hosts((tuple(ranks),)) if self.is_warming_up else self._extended.local_groups

    def begin_step(self) -> None:
        """Begins a round, unless one is open."""
        if self._is_open:
            return
        if self.has_common_weights:
            if not self.turns.sync_every:
                self.turns.sync_every = self._method.rule.next_interval(LastRound(1, self._rate()))
            self.turns.start()
        self._begin_round()
        self.have_begun = True

    def end_steps(self, steps: int) -> None:
        """Counts local steps, and synchronizes the fragments that are due."""
        self.turns.add(steps)
        due = self.turns.due
        if due:
            self._synchronize(due)

    def finish(self) -> None:
        """Synchronizes all that ranks have changed on their own; the count of steps begins anew."""
        if self.turns.changed and not self._is_open:  # Other fragments were synchronized before.
            self._begin_round()
        if self._is_open:
            self._synchronize(self.turns.changed)

    # -- Beginning and end of a round ----------------------------------------------------------

    def _begin_round(self) -> None:
        self._synchronizer.begin(from_common=self.has_common_weights)
        self._is_open = True

    def _synchronize(self, numbers: list[int]) -> None:
        """Ends the round by a synchronization of fragments, and chooses the next interval."""
        steps = self.turns.since
        if self.clock is not None:
            self.clock.note_round(steps, self._rate())
        self._synchronizer.synchronize(numbers)
        self.turns.end(numbers)
        self._is_open = False
        # A round may have no steps, at the end of the data.
        if self.clock is not None and steps and numbers:
            rate, step, exchange = self.clock.read()
            whole = exchange * len(self.fragments) / len(numbers)
            last = LastRound(self.turns.sync_every, rate, step, whole)
            self.turns.sync_every = self._method.rule.next_interval(last)

    def _rate(self) -> float:
        """Returns the inner learning rate, 0 for a model without an optimizer."""
        rate = getattr(inner_of(self._model.optimizer), "learning_rate", 0.0)
        return float(keras.ops.convert_to_numpy(rate))

    # -- What others ask -----------------------------------------------------------------------

    @property
    def collective(self) -> Collective:
        """The job's collective."""
        return self._extended.collective

    @property
    def stop_vote(self) -> StopVote:
        """Vote by which all ranks stop after a synchronization because one has asked to."""
        return self._synchronizer.stop_vote

    @property
    def synchronized(self) -> bool:
        """Whether the last step was followed by a synchronization, or was synchronous."""
        return not self._is_open

    @property
    def has_common_weights(self) -> bool:
        """Whether the weights of all fragments are the same on all ranks."""
        return not self._is_open and not self.turns.changed

    def fits(self, model: keras.Model) -> bool:
        """Returns whether the model still has the weights for which these rounds were made."""
        return list(map(id, model.trainable_variables)) == list(map(id, self._weights))

    def trace_again(self) -> None:
        """Drops the graphs, because metrics, observers or optimizers may have changed."""
        self._synchronizer.trace_again()

    def resume(self, turns: Mapping[str, Any]) -> None:
        """Continues after a synchronization of an earlier training.

        Args:
            turns: The turns' notes at that time.
        """
        self.turns.restore(turns)
        self._is_open = False
