"""Global Keras steps, which split the batch, run the replicas and combine their results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdml.collectives.aggregator import sum_packed
from tfdml.collectives.collective import Collective
from tfdml.strategies.fit_session import FitSession, Observer, get_session
from tfdml.strategies.input.input_checks import check_digests, digest_slots
from tfdml.strategies.input.local_batch import LocalBatch, ShareInfo, take_rows, without_optionals
from tfdml.strategies.observers.gradient_watch import GradientWatch
from tfdml.strategies.observers.step_clock import StepClock
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.replica_step import ReplicaStep, metric_variables
from tfdml.strategies.replicas.row_gathering import concat_rows, gather_rows
from tfdml.strategies.replicas.step_state import (
    LayerState,
    MetricState,
    moving_variables,
)


class GlobalStep:
    """Step function on global batches, called in cross-replica context.

    Args:
        model: The Keras model.
        step: Function that each replica runs on its rows; its name prefixes the exchanges' names.
        around: Wrapper that takes the step and returns the function that replicas run instead.
    """

    def __init__(self, model: keras.Model, step: Callable, around: Callable | None = None):
        self.model = model
        self.name = step.__name__
        self._replica_step = ReplicaStep(model, step, around)

    @property
    def _strategy(self) -> tf.distribute.Strategy:
        return self.model.distribute_strategy

    @property
    def _extended(self) -> ReplicaExtended:
        return self._strategy.extended

    # The model's session, for a train step only.
    _session: FitSession | None = None

    def _run(self, local_batch: LocalBatch) -> list:
        """Runs the step on each replica's rows; returns one result per local replica."""
        rows = self._extended.replica_values(without_optionals(local_batch.parts))
        extended = self._extended
        with extended.working_on(local_batch.shares, self._session), extended.around_step():
            outputs = self._replica_step(rows)
        local = [self._results_of_replicas(o) for o in tf.nest.flatten(outputs)]
        return [tf.nest.pack_sequence_as(outputs, list(flat)) for flat in zip(*local, strict=True)]

    def _results_of_replicas(self, output: Any) -> tuple:
        """Returns one output per local replica; they all share an output that is not a tensor."""
        results = self._strategy.experimental_local_results(output)
        number = self._extended.num_local_replicas
        return results if len(results) == number else results * number


class StepMessage(NamedTuple):
    """Values that the ranks sum after a step, in one exchange per dtype.

    Attributes:
        metrics: The step's contributions to the metrics' variables.
        layers: This rank's part of the layers' averaged moving statistics.
        digests: Table with the digest of this rank's batch, to check that all ranks have the same.
        observers: The slots of the step's observers.
    """

    metrics: list[tf.Tensor]
    layers: list[tf.Tensor]
    digests: tf.Tensor
    observers: list[tf.Tensor]

    def summed(self, collective: Collective, name: str) -> "StepMessage":
        """Returns the sums over all ranks.

        Args:
            collective: Collective that sums the values.
            name: Name of the exchange.
        """
        sums = sum_packed(collective, tf.nest.flatten(self), name)
        return tf.nest.pack_sequence_as(self, sums)


class MetricStep(GlobalStep):
    """Train or test step that returns the metrics over all data so far.

    Args:
        model: The Keras model.
        step: The model's `train_step` or `test_step`.
        around: As in `GlobalStep`.
    """

    def __init__(self, model: keras.Model, step: Callable, around: Callable | None = None):
        super().__init__(model, step, around)
        self._metric_variables()
        if self.name == "train_step":
            self._session = get_session(model)
            optimizer = getattr(model, "optimizer", None)
            self._session.accumulate(getattr(optimizer, "inner_optimizer", optimizer))

    @property
    def _observers(self) -> list[Observer]:
        """The observers that this step tells what happens in it."""
        return [] if self._session is None else self._session.observers

    def _metric_variables(self) -> list[keras.Variable]:
        variables = metric_variables(self.model)
        self._extended.keep_in_step([v.value for v in variables])
        return variables

    def __call__(self, batch: Any) -> Any:
        """Runs the step on a global batch; returns Keras's logs."""
        trains = self._session is not None
        metrics = MetricState(self._metric_variables())
        layers = LayerState(moving_variables(self.model) if trains else [])
        observers = self._observers
        # Only after the batch has batch_tensors: at the end of the data the state must not change.
        batch_tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if t is not None]
        with tf.control_dependencies(batch_tensors):
            metrics.set_aside()
            if self._extended.is_local:
                layers.set_aside()
            for observer in observers:
                observer.begin()
        batch = self._extended.recorder.begin_step(batch)
        local_batch = self._extended.make_local_batch(batch)
        shares = local_batch.shares
        if trains:
            self._note_batch(local_batch)
        outputs = self._outputs(local_batch)
        collective = self._extended.collective
        own = StepMessage(
            metrics.contributions(shares),
            layers.contributions(shares),
            digest_slots(local_batch.digest, collective),
            [observer.slots() for observer in observers],
        )
        totals = own.summed(collective, f"{self.name}/state")
        check_digests(totals.digests)
        for observer, total in zip(observers, totals.observers, strict=True):
            observer.add(total)
        layers.assign(totals.layers)
        with metrics.assign(totals.metrics):
            results = {k: r.now() for k, r in self._replica_step.results.items()}
            outputs = [self._recompute_derived(output) for output in outputs]
        return self._logs(results, outputs, shares)

    def _note_batch(self, local_batch: LocalBatch) -> None:
        """Passes this process's rows to the session's clock, and the step's beginning to its watch.

        Unlike other observers, these two take note of each local step.
        """
        clock, watch = self._session.observer(StepClock), self._session.observer(GradientWatch)
        if clock is not None:
            clock.note_batch(local_batch.rows)
        if watch is not None:
            watch.begin_step()

    def _outputs(self, local_batch: LocalBatch) -> list:
        """Returns the step's outputs, one per local replica."""
        if self._session is None or self._session.accumulator is None:
            return self._run(local_batch)
        return self._session.accumulator.branch(lambda: self._run(local_batch))

    def _logs(self, results: dict[str, Any], outputs: list, shares: list[ShareInfo]) -> Any:
        """Returns the metrics' results, and the replicas' mean of all other outputs."""
        if not results:
            return self._mean(outputs, shares)
        own = [{k: v for k, v in o.items() if k not in results} for o in outputs]
        means = self._mean(own, shares) if own[0] else {}
        return {k: results[k] if k in results else means[k] for k in outputs[0]}

    def _recompute_derived(self, output: Any) -> Any:
        """Returns a replica's outputs, with those derived from metrics computed again."""
        step = self._replica_step
        if not step.derived:
            return output
        return {k: step.recompute_output(v) if k in step.derived else v for k, v in output.items()}

    def _mean(self, outputs: list, shares: list[ShareInfo]) -> Any:
        """Returns the mean of the replicas' estimates, weighted by their rows."""
        weighted = [
            [tf.where(s.rows > 0, v * s.fraction(v.dtype), tf.zeros_like(v)) for v in values]
            for values, s in zip(map(_flat_numbers, outputs), shares, strict=True)
        ]
        means = []
        for number, values in enumerate(zip(*weighted, strict=True)):
            name = f"{self.name}/output_{number}"
            means += self._extended.collective.all_reduce([tf.add_n(list(values))], name)
        return tf.nest.pack_sequence_as(outputs[0], means)


class PredictStep(GlobalStep):
    """Predict step that returns the outputs for all rows of the batch, on every process."""

    def __call__(self, batch: Any) -> Any:
        """Runs the step on a global batch; returns tensors of shape `[global rows, ...]`.

        The tensors are dense, ragged or sparse, like the model's outputs.
        """
        collective = self._extended.collective
        local_batch = self._extended.make_local_batch(batch)
        slots = digest_slots(local_batch.digest, collective)
        check_digests(*sum_packed(collective, [slots], f"{self.name}/digests"))
        outputs = self._run(local_batch)
        flat = [
            [_without_padding(t, share) for t in tf.nest.flatten(output)]
            for output, share in zip(outputs, local_batch.shares, strict=True)
        ]
        gathered = [
            gather_rows(collective, concat_rows(parts), f"{self.name}/output_{i}")
            for i, parts in enumerate(zip(*flat, strict=True))
        ]
        return tf.nest.pack_sequence_as(outputs[0], gathered)


def _without_padding(output: Any, share: ShareInfo) -> Any:
    """Returns a replica's output without the row of a padded share."""
    if isinstance(output, tf.SparseTensor):
        return take_rows(output, tf.zeros_like(share.rows), share.rows)
    return share.drop_padding(output)


def _flat_numbers(structure: Any) -> list[tf.Tensor]:
    """Returns a structure's leaves as float tensors; the mean of integers need not be integer."""
    tensors = [tf.convert_to_tensor(t) for t in tf.nest.flatten(structure)]
    return [t if t.dtype.is_floating else tf.cast(t, tf.float32) for t in tensors]
