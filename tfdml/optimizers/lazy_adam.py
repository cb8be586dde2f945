"""LazyAdam: Adam that moves only the rows of an embedding table that a batch has looked up."""

from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.sparse_gradients import with_values
from tfdml.optimizers.touched_rows import TouchedRowsOptimizer, read_rows


@keras.saving.register_keras_serializable("tfdml")
class LazyAdam(TouchedRowsOptimizer, keras.optimizers.Adam):
    """Adam in which rows of an embedding table rest in steps that do not look them up.

    Keras's Adam moves every row of a table in each step, by the means of earlier gradients: a step
    costs as much as the table is large. Here a step reads and writes the means and weights of the
    rows that it has looked up, and only those, by Adam's rule and its bias correction for the
    number of steps. A table whose rows are all looked up in every step, and all variables with
    dense gradients, train as with Keras's Adam.

    Args:
        learning_rate: A float, a schedule, or a function without arguments.
        beta_1: Decay rate of the mean of gradients, from 0 to below 1.
        beta_2: Decay rate of the mean of squared gradients, from 0 to below 1.
        epsilon: Constant added to the root of the mean of squared gradients.
        amsgrad: Whether to divide by the largest mean of squared gradients so far.
        **options: The other arguments of `keras.optimizers.Adam`, but not
            `gradient_accumulation_steps`; `weight_decay` acts on looked-up rows alone.

    Raises:
        ValueError: If gradients should be accumulated.

    Reference:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980; the lazy
        variant is that of TensorFlow Addons' `LazyAdam`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Any,
    ):
        if options.get("gradient_accumulation_steps"):
            raise ValueError(
                "`gradient_accumulation_steps` must be None, because accumulated gradients are "
                "dense: all rows would move, as with Adam. Received: gradient_accumulation_steps="
                f"{options['gradient_accumulation_steps']!r}. Use a larger batch, or "
                "`keras.optimizers.Adam` or `tfdml.optimizers.RowWiseAdagrad`."
            )
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, **options)

    def update_touched_rows(
        self, gradient: tf.IndexedSlices, variable: tf.Variable, rate: tf.Tensor
    ) -> None:
        """Updates the rows of a sparse gradient; see `TouchedRowsOptimizer`."""
        dtype, index = variable.dtype, self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        step = tf.cast(self.iterations + 1, dtype)
        # As Keras rounds them.
        beta_1, beta_2 = (keras.ops.cast(beta, dtype) for beta in (self.beta_1, self.beta_2))
        alpha = rate * tf.sqrt(1 - tf.pow(beta_2, step)) / (1 - tf.pow(beta_1, step))

        grads, rows = gradient.values, gradient.indices
        means = read_rows(m.value, rows)
        means += (grads - means) * (1 - self.beta_1)
        squares = read_rows(v.value, rows)
        squares += (tf.square(grads) - squares) * (1 - self.beta_2)
        self.assign(m, with_values(gradient, means))
        self.assign(v, with_values(gradient, squares))
        if self.amsgrad:
            largest = self._velocity_hats[index]
            squares = tf.maximum(read_rows(largest.value, rows), squares)
            self.assign(largest, with_values(gradient, squares))
        update = means * alpha / (tf.sqrt(squares) + self.epsilon)
        self.assign_sub(variable, with_values(gradient, update))

    def update_all_rows(self, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        """Updates a variable by a dense gradient; see `TouchedRowsOptimizer`."""
        keras.optimizers.Adam.update_step(self, gradient, variable, rate)
