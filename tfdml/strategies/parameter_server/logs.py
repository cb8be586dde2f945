"""Metrics of the whole data on the chief: each finished step adds its part, once."""

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.parameter_server.extended import CHIEF_DEVICE
from tfdml.strategies.parameter_server.packing import unpack


class Logs:
    """What steps return, added up.

    A step of a worker that died runs again, but it is added once, for it returned once.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._variables = model.metrics_variables
        self._size = sum(int(np.prod(v.shape)) for v in self._variables)
        self._pending = np.zeros(self._size)
        self._own: np.ndarray = np.zeros(0)
        # What a step of the user's own returns besides the metrics.
        self.own_names: list[str] = []
        self._add_to_metrics = tf.function(self._add)

    def add(self, results: tf.Tensor) -> None:
        """Adds a finished step: its metrics' parts, then numbers of its own."""
        vector = results.numpy()
        self._pending = self._pending + vector[: self._size]
        self._own = vector[self._size :]

    def result(self) -> dict[str, float]:
        """Returns the metrics of all steps so far, and the last step's own numbers."""
        pending, self._pending = self._pending, np.zeros(self._size)
        results = self._add_to_metrics(tf.constant(pending))
        own = dict(zip(self.own_names, self._own.tolist(), strict=False))
        return {**tf.nest.map_structure(lambda t: t.numpy(), results), **own}

    def _add(self, vector: tf.Tensor) -> dict:
        with tf.device(CHIEF_DEVICE):
            for variable, value in zip(
                self._variables, unpack(vector, self._variables), strict=True
            ):
                variable.value.assign_add(value)
            return self._model.get_metrics_result()
