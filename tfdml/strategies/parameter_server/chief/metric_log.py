"""Metrics of all data on the chief, to which each finished step adds its part once."""

import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.parameter_server.extended import CHIEF_DEVICE
from tfdml.strategies.parameter_server.step.result_packing import unpack
from tfdml.strategies.parameter_server.step.share_step import ShareStep
from tfdml.strategies.parameter_server.step.worker_step import WorkerStep
from tfdml.strategies.replicas.replica_step import metric_variables

# Metrics are computed often enough to look live, but not at every step: computing them costs the
# chief more than everything else that it does for a step.
_REFRESH_SECONDS = 0.05


class MetricLog:
    """Sum of the results that steps return.

    A step whose worker died runs again, but returns only once, so it is added only once.

    Args:
        model: The model.
        step: The step, which knows the keys of its results.
        fetch: Function that returns the results not yet added. Each is a vector of the step's
            metric contributions, followed by its own numbers; what comes then is left out.
    """

    def __init__(
        self,
        model: keras.Model,
        step: WorkerStep | ShareStep,
        fetch: Callable[[], Sequence[np.ndarray]],
    ):
        self._step = step
        self._fetch = fetch
        self._variables = metric_variables(model)
        self._size = sum(int(np.prod(v.shape)) for v in self._variables)
        self._pending = np.zeros(self._size)
        self._own: np.ndarray = np.zeros(0)
        # Keras keeps the dictionary that a step returned until the epoch's end, when it must be up
        # to date.
        self._shown: dict = {}
        self._due = 0.0
        self._add_to_metrics = tf.function(self._add)

    def add(self, vector: np.ndarray) -> None:
        """Adds a finished step's results."""
        self._pending = self._pending + vector[: self._size]
        self._own = vector[self._size :]

    def recent(self) -> dict[str, float]:
        """Returns the logs of `result`, possibly up to 50 ms old."""
        return self.result() if time.monotonic() >= self._due else self._shown

    def result(self) -> dict[str, float]:
        """Returns the metrics of all steps so far, and the last step's own numbers.

        Every call returns the same dictionary, updated.
        """
        for vector in self._fetch():
            self.add(vector)
        pending, self._pending = self._pending, np.zeros(self._size)
        results = self._add_to_metrics(tf.constant(pending))
        own = dict(zip(self._step.own_names, self._own.tolist(), strict=False))
        self._shown.update(tf.nest.map_structure(lambda t: t.numpy(), results), **own)
        self._due = time.monotonic() + _REFRESH_SECONDS
        return self._shown

    def expire(self) -> None:
        """Forces the next step's logs to be computed, at the end of an epoch."""
        self._due = 0.0

    def _add(self, vector: tf.Tensor) -> dict:
        with tf.device(CHIEF_DEVICE):
            for variable, value in zip(
                self._variables, unpack(vector, self._variables), strict=True
            ):
                variable.value.assign_add(value)
            return {key: result.now() for key, result in self._step.metric_results.items()}
