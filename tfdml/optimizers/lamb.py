"""LAMB: Adam with each layer's update scaled to the norm of its weights."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.optimizers.exclusion import BIASES_AND_SCALES
from tfdml.optimizers.fused_updates import subtract, update_moments
from tfdml.optimizers.layerwise import LayerwiseOptimizer, trust_ratio


@keras.saving.register_keras_serializable("tfdml")
class LAMB(LayerwiseOptimizer):
    """Adam with weight decay inside the update and a trust ratio for each layer.

    For the gradient g of a variable w at step t:

        m = beta_1 m + (1 - beta_1) g            v = beta_2 v + (1 - beta_2) g²
        u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay w
        w = w - learning_rate ‖w‖ / ‖u‖ u

    A variable that is excluded from adaptation, or has a norm of 0, has a trust ratio ‖w‖ / ‖u‖ of
    1. By default biases and the scales and offsets of normalisation layers are excluded from
    adaptation and from weight decay: variables whose path matches `BIASES_AND_SCALES`. Presets:

    - The paper: `LAMB(weight_decay=0.01, exclude_from_weight_decay=[],
      exclude_from_layer_adaptation=[])`.
    - NVLAMB, NVIDIA's for BERT: `LAMB(weight_decay=0.01, global_clipnorm=1.0,
      exclude_from_layer_adaptation=[])`: gradients are scaled to a global norm of at most 1 first,
      and all layers adapt.
    - TensorFlow Model Garden's: `LAMB(weight_decay=0.01, exclude_from_weight_decay=[P],
      exclude_from_layer_adaptation=[P])` with P = `"LayerNorm|layer_norm|bias"`.
    - The first code for ALBERT: the same, with `bias_correction=False`.

    Args:
        learning_rate: A float, a schedule, or a function without arguments.
        beta_1: Decay rate of the mean of gradients, from 0 to below 1.
        beta_2: Decay rate of the mean of squared gradients, from 0 to below 1.
        epsilon: Constant added to the root of v.
        weight_decay: Weight decay factor; 0 or None for none.
        exclude_from_weight_decay: Regular expressions, searched for in the variables' paths;
            matching variables do not decay. None or [] excludes nothing.
        exclude_from_layer_adaptation: The same, for the trust ratio.
        bias_correction: Whether m and v are divided by 1 - beta^t.
        global_clipnorm: Largest global norm of the gradients, None for no clipping.
        trust_ratio_clip: Largest trust ratio, None for no limit.
        **options: The other arguments of `keras.optimizers.Optimizer`: `clipnorm`, `clipvalue`,
            `use_ema`, `ema_momentum`, `ema_overwrite_frequency`, `loss_scale_factor`,
            `gradient_accumulation_steps` and `name`.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
        arXiv:1904.00962.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = BIASES_AND_SCALES,
        exclude_from_layer_adaptation: Sequence[str] | None = BIASES_AND_SCALES,
        bias_correction: bool = True,
        global_clipnorm: float | None = None,
        trust_ratio_clip: float | None = None,
        **options: Any,
    ):
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"`{name}` must be from 0 to below 1. Received: {name}={beta!r}.")
        if not epsilon >= 0:
            raise ValueError(f"`epsilon` must not be negative. Received: epsilon={epsilon!r}.")
        if trust_ratio_clip is not None and not trust_ratio_clip > 0:
            raise ValueError(
                "`trust_ratio_clip` must be positive, or None for no limit. Received: "
                f"trust_ratio_clip={trust_ratio_clip!r}."
            )
        super().__init__(
            learning_rate,
            weight_decay,
            exclude_from_weight_decay,
            exclude_from_layer_adaptation,
            global_clipnorm=global_clipnorm,
            **options,
        )
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.bias_correction = bias_correction
        self.trust_ratio_clip = trust_ratio_clip

    def build(self, variables: Sequence) -> None:
        """Creates the means of gradients and of squared gradients, initially zeros."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def update_parts(self, gradients: Sequence, variables: Sequence, learning_rate: Any) -> None:
        """Updates one variable; see `LayerwiseOptimizer`."""
        dtype = variables[0].dtype
        wide = tf.float64 if dtype == tf.float64 else tf.float32
        # The update is computed without its factor `scale`, which saves one pass over the values:
        # u = scale (m / (sqrt(v) + epsilon root) + weight_decay / scale w).
        root, scale = self._corrections(tf.as_dtype(dtype), wide)
        updates = [
            self._update(gradient, variable, tf.cast(root, dtype), tf.cast(scale, dtype))
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        rate = tf.cast(learning_rate, wide) * scale
        if self._get_variable_index(variables[0]) in self._adapting:
            weights, norm = self._norms(variables, variables, updates)
            norm *= scale
            ratio = trust_ratio(weights, norm, norm)
            if self.trust_ratio_clip is not None:
                ratio = tf.minimum(ratio, tf.constant(self.trust_ratio_clip, wide))
            self._note_ratio(ratio, variables[0])
            rate *= ratio
        for variable, update in zip(variables, updates, strict=True):
            subtract(variable, rate, update)

    def _corrections(self, dtype: tf.DType, wide: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the root of v's bias correction, and that root divided by m's bias correction."""
        if not self.bias_correction:
            return tf.ones([], wide), tf.ones([], wide)
        step = tf.cast(self.iterations + 1, wide)
        beta_1, beta_2 = self.beta_1, self.beta_2
        if dtype == tf.float32:
            # The moments were computed with the rounded betas, so the correction must use them too.
            beta_1, beta_2 = float(np.float32(beta_1)), float(np.float32(beta_2))
        root = tf.sqrt(_one_minus_power(beta_2, step))
        return root, root / _one_minus_power(beta_1, step)

    def _update(self, gradient, variable, root: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        update_moments(m, v, gradient, self.beta_1, self.beta_2, variable)
        update = m / (tf.sqrt(v) + self.epsilon * root)
        if index in self._decaying:
            update += variable * (self.weight_decay / scale)
        return update

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "bias_correction": self.bias_correction,
            "trust_ratio_clip": self.trust_ratio_clip,
        }


def _one_minus_power(beta: float, step: tf.Tensor) -> tf.Tensor:
    """Returns 1 - beta^step; in float32, the plain formula loses two digits in the first steps."""
    return -tf.math.expm1(step * (math.log(beta) if beta > 0 else -math.inf))
