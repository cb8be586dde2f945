"""Updates of embedding tables that cost as much as the rows that a batch has looked up."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.sparse_gradients import add_up_rows, times, values_of, with_values


class TouchedRowsOptimizer(keras.optimizers.Optimizer):
    """Base class of optimizers that leave rows without a gradient as they are.

    The gradient of an embedding table is sparse: it has the rows that the batch has looked up.
    Their weights and slots are read and written, and no others. So the cost of a step does not grow
    with the table. Weight decay, too, acts on these rows alone. Dense gradients update all rows.

    `use_ema` and `gradient_accumulation_steps` keep numbers of the table's size, and work on all of
    them in every step. A regularizer of the table makes its gradient dense.
    """

    def apply(self, grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        """Applies gradients; see `keras.optimizers.Optimizer`."""
        factor = self.loss_scale_factor
        if factor is None:
            super().apply(grads, trainable_variables)
            return
        # Keras divides the gradients by it, which sparse ones do not support.
        self.loss_scale_factor = None
        try:
            unscaled = [None if g is None else times(g, 1 / factor) for g in grads]
            super().apply(unscaled, trainable_variables)
        finally:
            self.loss_scale_factor = factor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable; see `keras.optimizers.Optimizer`."""
        gradient = tf.cast(gradient, variable.dtype)
        rate = tf.cast(learning_rate, variable.dtype)
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if self.weight_decay and self._use_weight_decay(variable):
            present = read_rows(variable, gradient.indices) if is_sparse else variable
            decay = present * (tf.constant(self.weight_decay, variable.dtype) * rate)
            self.assign_sub(variable, with_values(gradient, decay))
        if is_sparse:
            self.update_touched_rows(gradient, variable, rate)
        else:
            self.update_all_rows(gradient, variable, rate)

    def update_touched_rows(
        self, gradient: tf.IndexedSlices, variable: tf.Variable, rate: tf.Tensor
    ) -> None:
        """Updates the rows of a sparse gradient.

        Args:
            gradient: The gradient, each row once, of the variable's dtype.
            variable: The variable; of a mirrored one, this device's component.
            rate: The learning rate: a scalar of the variable's dtype.
        """
        raise NotImplementedError

    def update_all_rows(self, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        """Updates a variable by a dense gradient.

        Args:
            gradient: The gradient, of the variable's shape and dtype.
            variable: The variable; of a mirrored one, this device's component.
            rate: The learning rate: a scalar of the variable's dtype.
        """
        raise NotImplementedError

    # -- What Keras calls ----------------------------------------------------------------------

    def _apply_weight_decay(self, variables: Sequence) -> None:
        """Does nothing: decay is part of the update."""

    def _clip_gradients(self, grads: Sequence) -> list:
        """Clips gradients in which each row occurs once, so that it counts once."""
        grads = [add_up_rows(g) for g in grads]
        # Here Keras would make sparse gradients dense.
        if self.clipvalue:
            return [None if g is None else _clipped(g, self.clipvalue) for g in grads]
        if self.global_clipnorm:
            factor = _clip_factor(grads, self.global_clipnorm)
            return [None if g is None else times(g, factor) for g in grads]
        return super()._clip_gradients(grads)


def read_rows(variable: Any, indices: tf.Tensor) -> tf.Tensor:
    """Returns rows of a variable without reading the others.

    `tf.gather` reads a distributed variable as a whole.

    Args:
        variable: A TensorFlow variable; of a mirrored one, this device's component is read.
        indices: Indices of the rows, int32 or int64.
    """
    own = variable._get() if hasattr(variable, "_get") else variable
    return tf.gather(own, indices)


def _clipped(gradient: Any, limit: float) -> Any:
    return with_values(gradient, tf.clip_by_value(values_of(gradient), -limit, limit))


def _clip_factor(gradients: Sequence, limit: float) -> tf.Tensor:
    """Returns the factor by which gradients have at most a global norm, as Keras computes it."""
    present = [values_of(g) for g in gradients if g is not None]
    wide = tf.float64 if any(g.dtype == tf.float64 for g in present) else tf.float32
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(tf.cast(g, wide))) for g in present]))
    # The difference is 0, or NaN for a norm that is not finite.
    return limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
