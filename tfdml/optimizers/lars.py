"""LARS: SGD with momentum and a learning rate for each layer, scaled to the weights' norm."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.optimizers.exclusion import BIASES_AND_SCALES
from tfdml.optimizers.fused_updates import subtract
from tfdml.optimizers.layerwise import LayerwiseOptimizer, trust_ratio


@keras.saving.register_keras_serializable("tfdml")
class LARS(LayerwiseOptimizer):
    """SGD with momentum and a trust ratio for each layer.

    For the gradient g of a variable w, with d = g + weight_decay w:

        joint:     ratio = trust_coefficient ‖w‖ / ‖d‖
        separate:  ratio = trust_coefficient ‖w‖ / (‖g‖ + weight_decay ‖w‖ + epsilon)
        classic:   b = momentum b + learning_rate ratio d        w = w - b
        else:      b = momentum b + d                            w = w - learning_rate ratio b

    A variable that is excluded from adaptation, or has a norm of 0, has a ratio of 1. By default
    biases and the scales and offsets of normalisation layers are excluded from adaptation and from
    weight decay: variables whose path matches `BIASES_AND_SCALES`. With all variables excluded it
    is SGD with momentum. Presets:

    - TensorFlow Model Garden, optax: the defaults, with patterns of your own.
    - The paper and MLPerf: `trust_denominator="separate"`.
    - SimCLR: `classic_momentum=False`. The joint ratio is then that of the update that is
      subtracted, b (with `nesterov`, momentum b + d); the separate one is still that of g.

    Args:
        learning_rate: A float, a schedule, or a function without arguments.
        momentum: Decay rate of b, from 0 to below 1.
        trust_coefficient: Fraction of its norm by which a layer is trusted to change in a step.
        weight_decay: Weight decay factor; 0 or None for none.
        nesterov: Whether to use Nesterov momentum.
        classic_momentum: Whether b contains the learning rate.
        trust_denominator: "joint" or "separate".
        epsilon: Constant added to the separate denominator.
        momentum_correction: Whether b is kept without the learning rate and multiplied by the
            current one. For `classic_momentum`, whose b otherwise lags behind jumps of the rate.
        exclude_from_weight_decay: Regular expressions, searched for in the variables' paths;
            matching variables do not decay. None or [] excludes nothing.
        exclude_from_layer_adaptation: The same, for the trust ratio.
        **options: The other arguments of `keras.optimizers.Optimizer`: `clipnorm`, `clipvalue`,
            `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps` and `name`.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        You et al., "Large Batch Training of Convolutional Networks", arXiv:1708.03888. For
        `momentum_correction`: Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677,
        section 3.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float | None = 0.0,
        nesterov: bool = False,
        classic_momentum: bool = True,
        trust_denominator: str = "joint",
        epsilon: float = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = BIASES_AND_SCALES,
        exclude_from_layer_adaptation: Sequence[str] | None = BIASES_AND_SCALES,
        momentum_correction: bool = False,
        **options: Any,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be from 0 to below 1. Received: momentum={momentum!r}."
            )
        if not trust_coefficient > 0:
            raise ValueError(
                "`trust_coefficient` must be positive. Received: "
                f"trust_coefficient={trust_coefficient!r}."
            )
        if trust_denominator not in ("joint", "separate"):
            raise ValueError(
                '`trust_denominator` must be "joint" or "separate". Received: '
                f"trust_denominator={trust_denominator!r}."
            )
        if not epsilon >= 0:
            raise ValueError(f"`epsilon` must not be negative. Received: epsilon={epsilon!r}.")
        if momentum_correction and not classic_momentum:
            raise ValueError(
                "`momentum_correction` must be False with classic_momentum=False, whose momentum "
                "does not contain the learning rate. Received: momentum_correction=True."
            )
        super().__init__(
            learning_rate,
            weight_decay,
            exclude_from_weight_decay,
            exclude_from_layer_adaptation,
            **options,
        )
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        self.nesterov = nesterov
        self.classic_momentum = classic_momentum
        self.trust_denominator = trust_denominator
        self.epsilon = epsilon
        self.momentum_correction = momentum_correction

    def build(self, variables: Sequence) -> None:
        """Creates the momentum variables, initially zeros."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_parts(self, gradients: Sequence, variables: Sequence, learning_rate: Any) -> None:
        """Updates one variable; see `LayerwiseOptimizer`."""
        dtype = variables[0].dtype
        wide = tf.float64 if dtype == tf.float64 else tf.float32
        gradients = [tf.cast(tf.convert_to_tensor(g), dtype) for g in gradients]
        index = self._get_variable_index(variables[0])
        decay = self.weight_decay if index in self._decaying else 0.0
        steps = gradients
        if decay:
            steps = [g + decay * w for g, w in zip(gradients, variables, strict=True)]
        rate = tf.cast(learning_rate, wide)
        inside, outside = (1.0, rate) if self.momentum_correction else (rate, 1.0)
        if self.classic_momentum:
            ratio = self._ratio(variables, gradients, steps, decay)
            scale = tf.convert_to_tensor(inside * ratio)
            steps = [tf.cast(scale, dtype) * s for s in steps]
            updates = self._through_momentum(variables, steps)
            factor = outside
        else:
            updates = self._through_momentum(variables, steps)
            factor = rate * self._ratio(variables, gradients, updates, decay)
        for variable, update in zip(variables, updates, strict=True):
            subtract(variable, factor, update)

    def _through_momentum(self, variables: Sequence, steps: Sequence) -> list:
        """Updates the momentum by the given steps; returns the updates without the outer factor."""
        updates = []
        for variable, step in zip(variables, steps, strict=True):
            momentum = self._momentums[self._get_variable_index(variable)]
            self.assign(momentum, self.momentum * momentum + step)
            updates.append(
                self.momentum * momentum + step if self.nesterov else tf.convert_to_tensor(momentum)
            )
        return updates

    def _ratio(
        self, variables: Sequence, gradients: Sequence, updates: Sequence, decay: float
    ) -> tf.Tensor | float:
        """Returns the trust ratio: float32 or float64."""
        if self._get_variable_index(variables[0]) not in self._adapting:
            return 1.0
        is_joint = self.trust_denominator == "joint"
        weights, norm = self._norms(variables, variables, updates if is_joint else gradients)
        denominator = norm if is_joint else norm + decay * weights + self.epsilon
        ratio = trust_ratio(self.trust_coefficient * weights, norm, denominator)
        self._note_ratio(ratio, variables[0])
        return ratio

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
            "nesterov": self.nesterov,
            "classic_momentum": self.classic_momentum,
            "trust_denominator": self.trust_denominator,
            "epsilon": self.epsilon,
            "momentum_correction": self.momentum_correction,
        }
