"""Train steps of one rank on its own rows, and the function that takes them in rounds."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.fit_session import Observer, get_session
from tfdml.strategies.input.local_batch import LocalBatch
from tfdml.strategies.keras_seam.local_updates.rounds import Rounds
from tfdml.strategies.keras_seam.step.optimizers import inner_of
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.global_step import MetricStep


class LocalStep(MetricStep):
    """Train step of a local group's ranks: of a job of their own, on their rows of a global batch.

    A group without rows takes its step with a gradient of 0.
    """

    def __call__(self, batch: Any) -> Any:
        """Runs the step on a global batch; returns Keras's logs of the group's rows."""
        local_batch = self._extended.make_local_batch(batch)
        # Only after the batch has arrived: at the end of the data nothing may change.
        tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if t is not None]
        with tf.control_dependencies(tensors):
            self._session.rounds.rows.note_batch(local_batch)
        with self._extended.locally():
            return super().__call__(self._of_own_rows(local_batch))

    @property
    def _observers(self) -> list[Observer]:
        """None: they observe synchronizations, and what happens between two of them."""
        return []

    def _of_own_rows(self, local_batch: LocalBatch) -> LocalBatch:
        """Returns the group's rows as a global batch of their own; its digest is compared later."""
        rows = tf.reduce_sum(local_batch.rows)
        if self._extended.collective.size > 1:
            (rows,) = self._extended.collective.all_reduce([rows], "local_updates/rows")
        own = tf.maximum(rows, 1)
        return local_batch._replace(global_rows=own, digest=tf.zeros_like(local_batch.digest))


class RoundsFunction:
    """Train function that takes local steps, and synchronizes between them.

    Args:
        model: The model.
        extended: The strategy's extended part.
        make: Function that returns Keras's train function for a step's class.
    """

    def __init__(
        self,
        model: keras.Model,
        extended: ReplicaExtended,
        make: Callable[[type[MetricStep]], Callable],
    ):
        self._model, self._extended, self._make = model, extended, make
        self._functions: dict[type[MetricStep], Callable] = {}
        rounds = self._prepare()
        if rounds is not None:
            rounds.trace_again()
            # A checkpoint restores what it has accumulated before the first step.
            get_session(model).accumulate(inner_of(getattr(model, "optimizer", None)))

    def __call__(self, iterator: Any) -> Any:
        """Takes the steps of an execution; returns Keras's logs."""
        rounds, model = self._prepare(), self._model
        if rounds is None or rounds.is_warming_up:
            return self._function(MetricStep)(iterator)
        rounds.begin_step()
        logs = self._function(LocalStep)(iterator)
        rounds.end_steps(model.steps_per_execution)
        return logs

    @property
    def executions_to_trace(self) -> int:
        """The number of executions of a whole round, which traces all graphs."""
        rounds = get_session(self._model).rounds
        every = 1 if rounds is None else max(rounds.turns.sync_every, 1)
        return -(-every // self._model.steps_per_execution)

    def _function(self, step: type[MetricStep]) -> Callable:
        if step not in self._functions:
            self._functions[step] = self._make(step)
        return self._functions[step]

    def _prepare(self) -> Rounds | None:
        """Returns the model's rounds, None if it has no weights yet."""
        session, model = get_session(self._model), self._model
        if not model.trainable_variables:
            return None
        if session.rounds is None or not session.rounds.fits(model):
            session.rounds = Rounds(model, self._extended.local_updates)
        return session.rounds
