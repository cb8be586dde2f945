"""Keras's loss scaling with bounds, and an error when a model has diverged.

That all replicas see the same overflow is the work of `strategies/keras_seam/step/optimizers.py`.
"""

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tfdml")
class LossScaleOptimizer(keras.mixed_precision.LossScaleOptimizer):
    """Scales the loss, so that small float16 gradients survive, and skips steps that overflow.

    In the scope of tfdml's strategies the gradients of all replicas are summed before they are
    checked, so an overflow on any replica skips the step, and halves the scale, on all. This holds
    for Keras's own optimizer too, in which `compile` wraps yours under the policy `mixed_float16`.
    This one adds bounds of the scale, and an error if every step overflows: then the model has
    diverged, and a smaller scale does not help.

    With `gradient_accumulation_steps`, an overflow in one of the steps skips their update.
    bfloat16 has float32's range: under `mixed_bfloat16` no scaling is needed.

    Args:
        inner_optimizer: The optimizer that takes the steps.
        initial_scale: The initial loss scale.
        dynamic_growth_steps: Steps without overflow after which the scale is doubled.
        minimum_scale: Lower bound of the scale.
        maximum_scale: Upper bound of the scale.
        max_skipped_steps: Consecutive steps that may overflow; one more raises an error. None for
            no limit.
        name: The optimizer's name.

    Raises:
        ValueError: If an argument is wrong.
        tf.errors.InvalidArgumentError: During training, if more than `max_skipped_steps`
            consecutive steps overflow.

    Reference:
        Micikevicius et al., "Mixed precision training", arXiv:1710.03740.
    """

    def __init__(
        self,
        inner_optimizer: keras.Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        minimum_scale: float = 1.0,
        maximum_scale: float = 2.0**24,
        max_skipped_steps: int | None = 50,
        name: str | None = None,
        **kwargs: Any,
    ):
        if isinstance(inner_optimizer, keras.mixed_precision.LossScaleOptimizer):
            raise ValueError(
                "`inner_optimizer` must not scale the loss itself. Received: "
                f"{type(inner_optimizer).__name__}. Pass the optimizer inside it."
            )
        if not 0 < minimum_scale <= initial_scale <= maximum_scale:
            raise ValueError(
                "`initial_scale` must lie between `minimum_scale`, which is positive, and "
                f"`maximum_scale`. Received: initial_scale={initial_scale}, "
                f"minimum_scale={minimum_scale}, maximum_scale={maximum_scale}."
            )
        for argument, value in (
            ("dynamic_growth_steps", dynamic_growth_steps),
            ("max_skipped_steps", 1 if max_skipped_steps is None else max_skipped_steps),
        ):
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{argument}` must be a positive integer. Received: {argument}={value!r}."
                )
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name, **kwargs)
        self.minimum_scale = minimum_scale
        self.maximum_scale = maximum_scale
        self.max_skipped_steps = max_skipped_steps

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates Keras's variables, and the number of consecutive skipped steps."""
        self.skipped_steps = self.add_variable(
            shape=(), dtype="int", initializer="zeros", aggregation="none", name="skipped_steps"
        )
        super().build(variables)

    def _stateful_handle_finite_grads(self, grads, trainable_variables) -> None:
        super()._stateful_handle_finite_grads(grads, trainable_variables)
        self.dynamic_scale.assign(tf.minimum(self.dynamic_scale, self.maximum_scale))
        self.skipped_steps.assign(0)

    def _stateful_handle_non_finite_grads(self) -> None:
        super()._stateful_handle_non_finite_grads()
        scale = tf.maximum(tf.convert_to_tensor(self.dynamic_scale), self.minimum_scale)
        self.dynamic_scale.assign(scale)
        skipped = tf.convert_to_tensor(self.skipped_steps) + 1
        self.skipped_steps.assign(skipped)
        if self.max_skipped_steps is None:
            return
        message = (
            f"At most {self.max_skipped_steps} steps in a row may overflow (`max_skipped_steps`). "
            "Received one more: the model diverged, not the scale. Lower the learning rate, clip "
            "the gradients, or look for NaN in the data. Steps and scale:"
        )
        tf.debugging.Assert(skipped <= self.max_skipped_steps, [message, skipped, scale])

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "minimum_scale": self.minimum_scale,
            "maximum_scale": self.maximum_scale,
            "max_skipped_steps": self.max_skipped_steps,
        }
