"""Base class of LARS and LAMB: learning rates per layer, by the norms of weights and updates."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.optimizers.exclusion import Exclusion, whole_path
from tfdml.optimizers.norms import row_norms, squared_norm


class LayerwiseOptimizer(keras.optimizers.Optimizer):
    """Base class of optimizers that multiply each variable's learning rate by a trust ratio.

    Weight decay is part of the update, before the trust ratio. Sparse gradients, as of an
    `Embedding`, are converted to dense ones: momentum and decay change every row, and norms are
    those of the whole table.

    Args:
        learning_rate: A float, a schedule, or a function without arguments.
        weight_decay: Weight decay factor; 0 or None for none.
        exclude_from_weight_decay: Patterns of variables that do not decay; see `Exclusion`.
        exclude_from_layer_adaptation: Patterns of variables whose trust ratio is 1.
        **options: The arguments of `keras.optimizers.Optimizer`.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float | None,
        exclude_from_weight_decay: Sequence[str] | None,
        exclude_from_layer_adaptation: Sequence[str] | None,
        **options: Any,
    ):
        if weight_decay is not None and not weight_decay >= 0:
            raise ValueError(
                f"`weight_decay` must not be negative. Received: weight_decay={weight_decay!r}."
            )
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **options)
        # Keras's method `exclude_from_weight_decay` works in addition to the patterns.
        self._undecayed = Exclusion("exclude_from_weight_decay", exclude_from_weight_decay)
        self._unadapted = Exclusion("exclude_from_layer_adaptation", exclude_from_layer_adaptation)
        self._trust_ratios: TrustRatios | None = None
        # Set by a strategy that divides variables among ranks: function of a variable's index and
        # the `row_norms` of tensors of the shape of its part. It returns norms of which those of
        # the whole tensors are made, or None for a variable that is not divided.
        self.gather_row_norms: Callable[[int, list[tf.Tensor]], list[tf.Tensor] | None] | None
        self.gather_row_norms = None

    def build(self, variables: Sequence) -> None:
        """Decides for each variable whether it decays and adapts; subclasses create their slots.

        Args:
            variables: The trainable variables.
        """
        super().build(variables)
        numbered = list(enumerate(variables))
        self._paths = tuple(whole_path(v) for v in variables)
        self._decaying = frozenset(
            i
            for i, v in numbered
            if self.weight_decay and not self._undecayed.excludes(v) and self._use_weight_decay(v)
        )
        self._adapting = frozenset(i for i, v in numbered if not self._unadapted.excludes(v))
        self._watch_trust_ratios()

    def apply(self, grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        """Applies gradients; see `keras.optimizers.Optimizer`."""
        if self.loss_scale_factor is not None:
            # Keras divides the gradients by it, which sparse ones do not support.
            grads = _dense(grads)
        super().apply(grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable that is stored in one piece; see `update_parts`."""
        self.update_parts([gradient], [variable], learning_rate)

    def update_parts(self, gradients: Sequence, variables: Sequence, learning_rate: Any) -> None:
        """Updates one variable that is stored in parts, with norms over all of them.

        A strategy with partitioned variables calls this once for each whole variable; Keras calls
        `update_step` for each variable that is in one piece.

        Args:
            gradients: The parts' gradients.
            variables: The parts, of one dtype, all of them passed to `build` before.
            learning_rate: The learning rate, a scalar.
        """
        raise NotImplementedError

    def keep_trust_ratios(self) -> "TrustRatios":
        """Returns an object that records the trust ratios of each update from now on.

        A train function that was traced before must be traced again. The record is not part of the
        optimizer's state, so saved files stay the same.
        """
        if self._trust_ratios is None:
            self._trust_ratios = TrustRatios()
            if self.built:
                self._watch_trust_ratios()
        return self._trust_ratios

    def _watch_trust_ratios(self) -> None:
        if self._trust_ratios is not None:
            with tf.init_scope(), self._distribution_strategy.scope():
                self._trust_ratios.watch({i: self._paths[i] for i in sorted(self._adapting)})

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "exclude_from_weight_decay": self._undecayed.patterns,
            "exclude_from_layer_adaptation": self._unadapted.patterns,
        }

    # -- For subclasses ------------------------------------------------------------------------

    def _norms(self, variables: Sequence, *values: Sequence) -> list[tf.Tensor]:
        """Returns norms of values of a whole variable: scalars, float32 or float64.

        Args:
            variables: The variable's parts.
            *values: For each norm, the values that belong to the parts.
        """
        if self.gather_row_norms is not None:
            index = self._get_variable_index(variables[0])
            rows = self.gather_row_norms(index, [row_norms(part) for (part,) in values])
            if rows is not None:
                return [tf.sqrt(squared_norm(r)) for r in rows]
        return [tf.sqrt(tf.add_n([squared_norm(part) for part in parts])) for parts in values]

    def _note_ratio(self, ratio: tf.Tensor, variable: Any) -> None:
        if self._trust_ratios is not None:
            self._trust_ratios.note(self._get_variable_index(variable), ratio)

    # -- What Keras calls ----------------------------------------------------------------------

    def _apply_weight_decay(self, variables: Sequence) -> None:
        """Does nothing: decay is part of the update."""

    def _clip_gradients(self, grads: Sequence) -> list:
        """Clips dense gradients, so that a row that occurs twice in a sparse one counts once."""
        return super()._clip_gradients(_dense(grads))


class TrustRatios:
    """Trust ratios of the last update, kept on the device until they are read.

    Attributes:
        paths: Paths of the variables that adapt; empty until the optimizer is built.
    """

    def __init__(self):
        self.paths: list[str] = []
        self._variables: dict[int, tf.Variable] = {}

    def watch(self, paths: dict[int, str]) -> None:
        """Creates a record for each variable.

        Args:
            paths: The variables' paths by their index in the optimizer.
        """
        self.paths = list(paths.values())
        self._variables = {i: tf.Variable(1.0, trainable=False, name="trust_ratio") for i in paths}

    def note(self, index: int, ratio: tf.Tensor) -> None:
        """Records a variable's ratio."""
        self._variables[index].assign(tf.cast(ratio, tf.float32))

    def read(self) -> np.ndarray:
        """Returns all ratios, in the order of `paths`: float32, shape `[adapted variables]`."""
        if not self._variables:
            return np.zeros(0, "float32")
        return tf.stack([tf.convert_to_tensor(v) for v in self._variables.values()]).numpy()


def _dense(gradients: Sequence) -> list:
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def trust_ratio(weights: tf.Tensor, update: tf.Tensor, denominator: tf.Tensor) -> tf.Tensor:
    """Returns `weights / denominator`, or 1 if a norm is 0.

    Args:
        weights: The weights' norm.
        update: The update's norm.
        denominator: The divisor: positive if both norms are.
    """
    usable = tf.logical_and(weights > 0, update > 0)
    one = tf.ones_like(weights)
    return tf.where(usable, weights / tf.where(usable, denominator, one), one)
