"""RowWiseAdagrad: Adagrad with one accumulator for each row of an embedding table."""

import copy
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.sparse_gradients import with_values
from tfdml.optimizers.touched_rows import TouchedRowsOptimizer, read_rows


@keras.saving.register_keras_serializable("tfdml")
class RowWiseAdagrad(TouchedRowsOptimizer):
    """Adagrad that keeps one number for each row of a matrix, as DLRM and TorchRec do.

    For the gradient g of a row w of D numbers:

        a = a + Σ g² / D            w = w - learning_rate g / (sqrt(a) + epsilon)

    So the slots of an embedding table take 1/D of its memory. Rows that a batch did not look up are
    neither read nor written, see `TouchedRowsOptimizer`. Variables that are not matrices, such as
    biases and convolutions, have an accumulator for each number, as in Adagrad. Accumulators are
    kept in float32 or wider.

    Args:
        learning_rate: A float, a schedule, or a function without arguments.
        initial_accumulator_value: Value of the accumulators before the first step, at least 0.
        epsilon: Constant added to the root of the accumulator, positive.
        **options: The other arguments of `keras.optimizers.Optimizer`: `weight_decay`, which acts
            on looked-up rows alone, `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`,
            `ema_momentum`, `ema_overwrite_frequency`, `loss_scale_factor`,
            `gradient_accumulation_steps` and `name`.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
        Systems", arXiv:1906.00091; `torchrec.optim.RowWiseAdagrad`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-10,
        **options: Any,
    ):
        if not initial_accumulator_value >= 0:
            raise ValueError(
                "`initial_accumulator_value` must not be negative. Received: "
                f"initial_accumulator_value={initial_accumulator_value!r}."
            )
        if not epsilon > 0:
            raise ValueError(
                "`epsilon` must be positive, because the accumulator of a row without a gradient "
                f"may be 0. Received: epsilon={epsilon!r}."
            )
        super().__init__(learning_rate=learning_rate, **options)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, variables: Sequence) -> None:
        """Creates the accumulators: one number for each row of a matrix."""
        if self.built:
            return
        super().build(variables)
        self._accumulators = [self._add_accumulator(variable) for variable in variables]

    def _add_accumulator(self, variable: Any) -> keras.Variable:
        initial = keras.initializers.Constant(self.initial_accumulator_value)
        shape, dtype = tuple(variable.shape), tf.as_dtype(variable.dtype)
        shape = shape[:1] if len(shape) == 2 else shape
        dtype = dtype.name if dtype.size >= 4 else "float32"
        if not isinstance(variable, keras.Variable):
            return self.add_variable(shape, initial, dtype, name="accumulator")
        # Keras makes a slot with the shape and dtype of its reference, on the same device.
        reference = copy.copy(variable)
        reference._shape, reference._dtype = shape, dtype
        return self.add_variable_from_reference(reference, "accumulator", initial)

    def update_touched_rows(
        self, gradient: tf.IndexedSlices, variable: tf.Variable, rate: tf.Tensor
    ) -> None:
        """Updates the rows of a sparse gradient; see `TouchedRowsOptimizer`."""
        accumulator = self._accumulators[self._get_variable_index(variable)]
        squares = _squares(gradient.values, accumulator.dtype)
        self.assign_add(accumulator, with_values(gradient, squares))
        sums = read_rows(accumulator.value, gradient.indices)
        self.assign_sub(variable, with_values(gradient, self._update(gradient.values, sums, rate)))

    def update_all_rows(self, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        """Updates a variable by a dense gradient; see `TouchedRowsOptimizer`."""
        accumulator = self._accumulators[self._get_variable_index(variable)]
        self.assign_add(accumulator, _squares(gradient, accumulator.dtype))
        sums = tf.convert_to_tensor(accumulator.value)
        self.assign_sub(variable, self._update(gradient, sums, rate))

    def _update(self, gradient: tf.Tensor, sums: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Returns what is subtracted from rows, given their accumulators."""
        divisor = tf.sqrt(sums) + self.epsilon
        if len(gradient.shape) == 2:
            divisor = divisor[:, tf.newaxis]
        update = tf.cast(rate, sums.dtype) * tf.cast(gradient, sums.dtype) / divisor
        return tf.cast(update, gradient.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon,
        }


def _squares(gradient: tf.Tensor, dtype: str) -> tf.Tensor:
    """Returns what a gradient adds to the accumulator: the mean of a matrix's rows' squares."""
    squares = tf.square(tf.cast(gradient, dtype))
    return tf.reduce_mean(squares, 1) if len(gradient.shape) == 2 else squares
