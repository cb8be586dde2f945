"""Rounds of local steps of a model's training, and the synchronizations that end them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import sum_in_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.local_updates import LocalUpdates
from tfdml.local_updates.sync_rules import FixedSyncRule, LastRound
from tfdml.strategies.aggregation.accumulation import accumulation_steps
from tfdml.strategies.fit_session import Observer, get_session
from tfdml.strategies.input.input_checks import check_digests, digest_slots
from tfdml.strategies.input.local_batch import DIGEST_SIZE, LocalBatch, ShareInfo
from tfdml.strategies.keras_seam.local_updates.fragment import Fragment, divide
from tfdml.strategies.keras_seam.step.optimizers import distinct_names, inner_of
from tfdml.strategies.observers.round_clock import RoundClock
from tfdml.strategies.observers.stop_vote import StopVote
from tfdml.strategies.replicas.global_step import StepMessage
from tfdml.strategies.replicas.rank_state import optimizers_of
from tfdml.strategies.replicas.replica_step import metric_variables
from tfdml.strategies.replicas.step_state import (
    LayerState,
    MetricState,
    components,
    moving_variables,
)


class Rounds:
    """Rounds of local steps, each ended by a synchronization of one fragment or of all.

    Between synchronizations each rank has weights, slots and metrics of its own. The sum of a
    metric's state over ranks is that of all data: a synchronization gives it to all, and when the
    next round begins, the ranks other than 0 start again from 0.

    All methods are called between steps, by all ranks, except for `note_batch`.

    Args:
        model: The model, built and compiled.
        method: The method of local updates.

    Attributes:
        sync_every: The number of local steps between synchronizations now.
        synchronized: Whether the last step was followed by a synchronization, or was synchronous.
        stop_vote: Vote by which all ranks stop after a synchronization because one has asked to.
        slots_differ: Whether ranks may have different slots.
        fragments: The model's fragments.
    """

    def __init__(self, model: keras.Model, method: LocalUpdates):
        strategy = model.distribute_strategy
        self._model, self._method = model, method
        self._strategy, self._extended = strategy, strategy.extended
        weights = list(model.trainable_variables)
        _refuse_replaced(weights)
        names = distinct_names(inner_of(model.optimizer), weights)
        self.fragments = [
            Fragment(i, [weights[j] for j in own], [names[j] for j in own], method, strategy)
            for i, own in enumerate(divide(len(weights), method.num_fragments))
        ]
        self._weights = weights
        self.stop_vote = StopVote()
        self._clock = None
        if not isinstance(method.rule, FixedSyncRule):
            self._clock = RoundClock(self._extended.collective)
        with tf.init_scope(), tf.device("CPU:0"):
            # Rows since the last synchronization of each fragment, and of any: this process's
            # replicas', and all.
            kinds, replicas = len(self.fragments) + 1, self._extended.num_local_replicas
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            self._rows, self._all_rows = zeros(kinds, replicas), zeros(kinds)
            self._digest = unmanaged_variable(tf.zeros([DIGEST_SIZE]))
        # Graphs of synchronizations, by the numbers of their fragments.
        self._functions: dict[tuple[int, ...], Any] = {}
        self._begin_function: Any = None
        # Of each fragment since its last synchronization: the steps that count for its next one,
        # and those that were taken; and the model's since any synchronization.
        self._steps = [0] * len(self.fragments)
        self._taken = [0] * len(self.fragments)
        self._since = 0
        self.sync_every = 0  # Not known before the first round.
        # Whether all weights, and the metrics, are the same on all ranks.
        self._all_common = self._metrics_are_whole = True
        self.synchronized, self.slots_differ = True, False

    @property
    def collective(self) -> Collective:
        """The job's collective."""
        return self._extended.collective

    def fits(self, model: keras.Model) -> bool:
        """Returns whether the model still has the weights for which these rounds were made."""
        return list(map(id, model.trainable_variables)) == list(map(id, self._weights))

    def trace_again(self) -> None:
        """Drops the graphs, because metrics, observers or optimizers may have changed."""
        self._functions.clear()
        self._begin_function = None

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
    def has_common_weights(self) -> bool:
        """Whether the weights of all fragments are the same on all ranks."""
        return self._all_common

    # -- Steps ---------------------------------------------------------------------------------

    def note_batch(self, local_batch: LocalBatch) -> None:
        """Adds a batch to the round, in the graph of its step.

        Args:
            local_batch: This process's part of a global batch.
        """
        rows = tf.cast(local_batch.rows, tf.float64)
        self._rows.assign_add(tf.ones([len(self.fragments) + 1, 1], tf.float64) * rows)
        all_rows = tf.cast(local_batch.global_rows, tf.float64)
        self._all_rows.assign_add(tf.fill([len(self.fragments) + 1], all_rows))
        if self._extended.collective.size > 1:
            both = tf.concat([self._digest.read_value(), local_batch.digest], 0)
            digest = tf.fingerprint(tf.reshape(both, [1, -1]))[0]
            self._digest.assign(tf.cast(digest, tf.float32))

    def begin_step(self) -> None:
        """Begins a round, if the last step was followed by a synchronization."""
        if not self._metrics_are_whole:
            return
        self._part(self._all_common)
        if self._all_common:
            if not self.sync_every:
                self.sync_every = self._method.rule.next_interval(LastRound(1, self._rate()))
            count = len(self.fragments)
            # As if they had taken their steps already, so that their synchronizations alternate.
            self._steps = [self.sync_every * i // count for i in range(count)]
        self._all_common = False
        self.slots_differ = True

    def _part(self, from_all: bool) -> None:
        """Parts the ranks: from here on each has metrics of its own.

        Args:
            from_all: Whether all weights are common, and become the last common ones.
        """
        if self._begin_function is None:
            self._begin_function = tf.function(self._begin, autograph=False)
        self._begin_function(tf.constant(from_all))
        self._metrics_are_whole = False

    def end_steps(self, steps: int) -> None:
        """Synchronizes the fragments that are due after some steps."""
        self.synchronized = False
        self._since += steps
        self._steps = [own + steps for own in self._steps]
        self._taken = [own + steps for own in self._taken]
        due = [i for i, own in enumerate(self._steps) if own >= self.sync_every]
        if due:
            self._synchronize(due)
            self._all_common = len(self.fragments) == 1

    def finish(self) -> None:
        """Synchronizes all fragments if there was a local step since; the count starts again."""
        due = [i for i, taken in enumerate(self._taken) if taken]
        if due and self._metrics_are_whole:  # After the synchronization of another fragment.
            self._part(False)
        if not self._metrics_are_whole:
            self._synchronize(due)
        self._all_common = True

    def _synchronize(self, numbers: Sequence[int]) -> None:
        """Synchronizes fragments, and what is the whole model's."""
        key = tuple(numbers)
        if self._clock is not None:
            self._clock.note_round(self._since, self._rate())
        if key not in self._functions:
            exchange = functools.partial(self._exchange, key)
            self._functions[key] = tf.function(exchange, autograph=False)
        with self._extended.collective_step("the synchronization of local updates", 0):
            self._functions[key]()
        is_timed, self._since = self._clock is not None and self._since > 0 and bool(key), 0
        for number in numbers:
            self._steps[number] = self._taken[number] = 0
        self._metrics_are_whole = self.synchronized = True
        if is_timed:
            rate, step, exchange = self._clock.read()
            whole = exchange * len(self.fragments) / len(numbers)
            last = LastRound(self.sync_every, rate, step, whole)
            self.sync_every = self._method.rule.next_interval(last)

    def _rate(self) -> float:
        """Returns the inner learning rate, 0 for a model without an optimizer."""
        rate = getattr(inner_of(self._model.optimizer), "learning_rate", 0.0)
        return float(keras.ops.convert_to_numpy(rate))

    # -- Graphs --------------------------------------------------------------------------------

    def _begin(self, all_fragments: tf.Tensor) -> None:
        """Begins a round.

        Args:
            all_fragments: Whether all fragments' weights are common: bool, shape `[]`.
        """
        for observer in self._observers:
            observer.begin()
        if self._extended.collective.rank > 0:
            MetricState(metric_variables(self._model)).clear()

        def begin() -> None:
            for fragment in self.fragments:
                fragment.begin()

        tf.cond(all_fragments, begin, lambda: None)

    def _exchange(self, numbers: tuple[int, ...]) -> None:
        """Synchronizes fragments, the metrics and the layers' moving statistics."""
        extended, session = self._extended, get_session(self._model)
        with self._strategy.scope():
            fragments = [self.fragments[number] for number in numbers]
            shares, observers = self._shares(-1), self._observers
            metrics = MetricState(metric_variables(self._model))
            layers = LayerState(self._averaged())
            with extended.working_on(shares, session):
                if self._clock is not None and fragments:
                    last = fragments[0].weights[0].value
                    self._clock.note_weights(tf.convert_to_tensor(last))
                sums = [
                    f.synchronize(self._fraction(n))
                    for n, f in zip(numbers, fragments, strict=True)
                ]
                if self._clock is not None and fragments:
                    self._clock.note_sums(sums)
            if 0 in numbers and self._method.average_slots:
                self._average_slots()
            own = StepMessage(
                metrics.held(),
                layers.contributions(shares),
                digest_slots(self._digest.read_value(), extended.collective),
                [observer.slots() for observer in observers],
            )
            totals = own.summed(extended.collective, "local_updates/state")
            check_digests(totals.digests)
            metrics.hold(totals.metrics)
            layers.assign(totals.layers)
            for observer, observed in zip(observers, totals.observers, strict=True):
                observer.add(observed)
            with tf.control_dependencies(tf.nest.flatten(totals)):
                self._forget_rows(numbers)

    def _forget_rows(self, numbers: tuple[int, ...]) -> None:
        """Begins to count rows anew, for fragments and for what is the whole model's."""
        kinds = len(self.fragments) + 1
        done = tf.one_hot([*numbers, kinds - 1], kinds, dtype=tf.float64)
        kept = 1 - tf.reduce_sum(done, 0)
        self._rows.assign(self._rows * kept[:, tf.newaxis])
        self._all_rows.assign(self._all_rows * kept)
        self._digest.assign(tf.zeros_like(self._digest))

    @property
    def _observers(self) -> list[Observer]:
        """The session's observers, for which a round is what a step is otherwise."""
        own = [self.stop_vote] if self._clock is None else [self.stop_vote, self._clock]
        return [*get_session(self._model).observers, *own]

    def _shares(self, number: int) -> list[ShareInfo]:
        """Returns the local replicas' shares of all rows since a fragment's last synchronization.

        Args:
            number: Number of the fragment, -1 for the last synchronization of any.
        """
        rows, all_rows = self._rows.read_value()[number], self._all_rows.read_value()[number]
        # Without a step since, all weights are equal, and so are the shares.
        is_empty, replicas = all_rows == 0, self._extended._num_replicas_in_sync
        rows = tf.where(is_empty, tf.ones_like(rows), rows)
        all_rows = tf.where(is_empty, tf.cast(replicas, tf.float64), all_rows)
        return [ShareInfo(own, all_rows) for own in tf.unstack(rows)]

    def _fraction(self, number: int) -> tf.Tensor:
        return tf.add_n([share.fraction(tf.float64) for share in self._shares(number)])

    def _averaged(self) -> list[keras.Variable]:
        """Returns variables that are averaged: moving statistics, and averages of weights.

        At the end of `fit`, an optimizer with `use_ema` assigns the averages to the weights, which
        must then be the same on all ranks.
        """
        optimizers = map(inner_of, optimizers_of(self._model))
        averages = [v for o in optimizers for v in _moving_averages(o)]
        return [*moving_variables(self._model), *averages]

    def _average_slots(self) -> None:
        slots = LayerState(self._slots())
        own = slots.contributions(self._shares(0))
        slots.assign(sum_in_buckets(self._extended.collective, own, "local_updates/slots"))

    def _slots(self) -> list[keras.Variable]:
        """Returns the floating-point slots of the model's optimizers, without averages."""
        return [
            variable
            for optimizer in map(inner_of, optimizers_of(self._model))
            for variable in optimizer.variables
            if keras.backend.is_float_dtype(variable.dtype)
            and variable is not optimizer._learning_rate
            and all(variable is not average for average in _moving_averages(optimizer))
        ]

    # -- State of a checkpoint -----------------------------------------------------------------

    @property
    def outer_optimizers(self) -> list[keras.Optimizer]:
        """The outer optimizers, which checkpoints save; that of `LocalSGD` has no state."""
        if self._method.is_plain_on_one_process:
            return []
        return [fragment.outer for fragment in self.fragments]

    @property
    def notes(self) -> dict[str, Any]:
        """The state that is the same on all ranks, for JSON."""
        return {
            "sync_every": self.sync_every,
            "steps": self._steps,
            "taken": self._taken,
            # Whether accumulated gradients are a mean over the rank's own rows.
            "means": not self.is_warming_up,
        }

    @property
    def state(self) -> dict[str, list[tf.Variable]]:
        """This rank's own variables after a synchronization, by name: the copies of each."""
        found = {}
        if self.slots_differ:
            for o, optimizer in enumerate(optimizers_of(self._model)):
                for i, variable in enumerate(optimizer.variables):
                    found[f"slots/{o}/{i}"] = components(variable)
        if len(self.fragments) > 1:
            found |= {"rows": [self._rows], "all_rows": [self._all_rows]}
            for f, fragment in enumerate(self.fragments):
                pairs = zip(fragment.anchors, fragment.weights, strict=True)
                for i, (anchor, weight) in enumerate(pairs):
                    found[f"anchors/{f}/{i}"] = components(anchor)
                    found[f"weights/{f}/{i}"] = components(weight)
        return found

    def restore(
        self, notes: Mapping[str, Any], before: Sequence[Mapping[str, np.ndarray]], step: int
    ) -> None:
        """Restores the state after a synchronization.

        With another number of ranks, slots become the mean of those of all ranks, and all weights
        the last common ones.

        Args:
            notes: `notes` at that time.
            before: Each rank's `state` as arrays, in rank order, for any number of ranks.
            step: The number of the epoch's batches that have been used; 0 between epochs.
        """
        self.sync_every, size = notes["sync_every"], self._extended.collective.size
        self.slots_differ = True
        own = before[self._extended.collective.rank % len(before)]
        for name, copies in self.state.items():
            values = [state[name] for state in before if name in state]
            if len(values) != len(before) or values[0].shape != tuple(copies[0].shape):
                continue
            value = own[name]
            if len(before) != size and name.startswith("slots/"):
                value = np.mean(values, 0) if value.dtype.kind == "f" else values[0]
            elif len(before) != size and name.startswith("weights/"):
                value = own[name.replace("weights/", "anchors/", 1)]
            elif len(before) != size:
                value = np.zeros_like(value) if "rows" in name else value
            for copy in copies:
                copy.assign(value)
        self._metrics_are_whole = self.synchronized = True
        self._all_common = not step or len(self.fragments) == 1 or len(before) != size
        if not self._all_common:
            self._steps, self._taken = list(notes["steps"]), list(notes["taken"])


def _moving_averages(optimizer: keras.Optimizer | None) -> list[keras.Variable]:
    """Returns an optimizer's moving averages of weights, if it has any."""
    return list(getattr(optimizer, "_model_variables_moving_average", None) or [])


def _refuse_replaced(weights: Sequence[keras.Variable]) -> None:
    for variable in weights:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"`local_updates` must not be used with float8 training, because the mean of the "
                f"ranks' scales is no scale. Received: {variable.path}, whose gradient replaces "
                f"its value. Leave out `local_updates`, or train in mixed_bfloat16."
            )
