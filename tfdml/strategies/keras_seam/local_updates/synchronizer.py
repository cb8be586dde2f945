"""Graphs that begin a round of local steps on each rank, and end it by an exchange of all."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.aggregator import sum_in_buckets
from tfdml.local_updates import LocalUpdates
from tfdml.strategies.fit_session import Observer, get_session
from tfdml.strategies.input.input_checks import check_digests, digest_slots
from tfdml.strategies.keras_seam.local_updates.averaged import averaged_variables, slots_of
from tfdml.strategies.keras_seam.local_updates.fragment import Fragment
from tfdml.strategies.keras_seam.local_updates.rows import SINCE_ANY, RoundRows
from tfdml.strategies.observers.round_clock import RoundClock
from tfdml.strategies.observers.stop_vote import StopVote
from tfdml.strategies.replicas.global_step import StepMessage
from tfdml.strategies.replicas.replica_step import metric_variables
from tfdml.strategies.replicas.step_state import LayerState, MetricState
from tfdml.timeline.rank_timeline import Kind


class Synchronizer:
    """Begins rounds, and synchronizes at their end what ranks have changed.

    The sum of a metric's state over local groups is that of all data: a synchronization gives it to
    all, and when the next round begins, the groups without rank 0 start again from 0.

    Args:
        model: The model.
        method: The method of local updates.
        fragments: The model's fragments.
        rows: Count of the rows since synchronizations.
        clock: Clock of the rounds; None if no times are needed.

    Attributes:
        stop_vote: Vote by which all ranks stop after a synchronization because one has asked to.
    """

    def __init__(
        self,
        model: keras.Model,
        method: LocalUpdates,
        fragments: Sequence[Fragment],
        rows: RoundRows,
        clock: RoundClock | None,
    ):
        self._model, self._extended = model, model.distribute_strategy.extended
        self._averages_slots = method.average_slots
        self._fragments, self._rows, self._clock = fragments, rows, clock
        self.stop_vote = StopVote()
        # Graphs of synchronizations, by whether they note times and by their fragments' numbers.
        self._exchanges: dict[tuple[bool, tuple[int, ...]], Any] = {}
        self._beginning: Any = None

    def trace_again(self) -> None:
        """Drops the graphs, because metrics, observers or optimizers may have changed."""
        self._exchanges.clear()
        self._beginning = None

    def begin(self, from_common: bool) -> None:
        """Begins a round: from here on each rank has metrics of its own.

        Args:
            from_common: Whether all weights are common, and become the last common ones.
        """
        if self._beginning is None:
            self._beginning = tf.function(self._begin, autograph=False)
        self._beginning(tf.constant(from_common))

    def synchronize(self, numbers: Sequence[int]) -> None:
        """Ends a round: synchronizes fragments, and what is the whole model's; a collective call.

        Args:
            numbers: Numbers of the fragments.
        """
        recorder = self._extended.recorder
        key = recorder.is_in_step, tuple(numbers)
        if key not in self._exchanges:
            exchange = functools.partial(self._exchange, tuple(numbers))
            self._exchanges[key] = tf.function(exchange, autograph=False)
        waiting = self._extended.collective_step("the synchronization of local updates", 0)
        with waiting, recorder.span(Kind.REST, "synchronization"):
            self._exchanges[key]()

    @property
    def _own_group(self) -> tuple[int, ...]:
        """The ranks that take local steps together with this one, itself included."""
        return self._extended.local_groups.local_ranks(self._extended.collective.rank)

    @property
    def _observers(self) -> list[Observer]:
        """The session's observers, for which a round is what a step is otherwise."""
        own = [self.stop_vote] if self._clock is None else [self.stop_vote, self._clock]
        return [*get_session(self._model).observers, *own]

    def _begin(self, from_common: tf.Tensor) -> None:
        """The graph of `begin`, with a bool of shape `[]`."""
        for observer in self._observers:
            observer.begin()
        if 0 not in self._own_group:
            MetricState(metric_variables(self._model)).clear()

        def begin_all() -> None:
            for fragment in self._fragments:
                fragment.begin()

        tf.cond(from_common, begin_all, lambda: None)

    def _exchange(self, numbers: tuple[int, ...]) -> None:
        """The graph of `synchronize`."""
        with self._model.distribute_strategy.scope():
            self._synchronize_fragments(numbers)
            if 0 in numbers and self._averages_slots:
                self._average_slots()
            self._exchange_state()
            self._rows.forget(numbers)

    def _synchronize_fragments(self, numbers: tuple[int, ...]) -> None:
        fragments = [self._fragments[number] for number in numbers]
        shares, session = self._rows.shares(SINCE_ANY), get_session(self._model)
        with self._extended.working_on(shares, session):
            if self._clock is not None and fragments:
                last = fragments[0].weights[0].value
                self._clock.note_weights(tf.convert_to_tensor(last))
            sums = [
                fragment.synchronize(self._rows.fraction(number))
                for number, fragment in zip(numbers, fragments, strict=True)
            ]
            if self._clock is not None and fragments:
                self._clock.note_sums(sums)

    def _average_slots(self) -> None:
        """Averages all slots when the first fragment's turn has come."""
        slots = LayerState(slots_of(self._model))
        own = slots.contributions(self._rows.shares(0))
        slots.assign(sum_in_buckets(self._extended.collective, own, "local_updates/slots"))

    def _exchange_state(self) -> None:
        """Gives all ranks the metrics, averaged variables and observations; compares batches."""
        collective, observers = self._extended.collective, self._observers
        metrics = MetricState(metric_variables(self._model))
        averaged = LayerState(averaged_variables(self._model))
        held = metrics.held()
        if collective.rank != self._own_group[0]:
            held = [tf.zeros_like(state) for state in held]
        own = StepMessage(
            held,
            averaged.contributions(self._rows.shares(SINCE_ANY)),
            digest_slots(self._rows.digest.read_value(), collective),
            [observer.slots() for observer in observers],
        )
        totals = own.summed(collective, "local_updates/state")
        check_digests(totals.digests)
        metrics.hold(totals.metrics)
        averaged.assign(totals.layers)
        for observer, observed in zip(observers, totals.observers, strict=True):
            observer.add(observed)
