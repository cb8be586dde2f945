"""Variables beside the weights that synchronizations average over ranks."""

import keras

from tfdml.strategies.keras_seam.step.optimizers import inner_of
from tfdml.strategies.replicas.rank_state import optimizers_of
from tfdml.strategies.replicas.step_state import moving_variables


def averaged_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns what each synchronization averages: moving statistics, and averages of weights.

    At the end of `fit`, an optimizer with `use_ema` assigns the averages to the weights, which must
    then be the same on all ranks.
    """
    optimizers = map(inner_of, optimizers_of(model))
    averages = [v for optimizer in optimizers for v in _averages_of_weights(optimizer)]
    return [*moving_variables(model), *averages]


def slots_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the floating-point slots of a model's optimizers, without averages of weights."""
    return [
        variable
        for optimizer in map(inner_of, optimizers_of(model))
        for variable in optimizer.variables
        if keras.backend.is_float_dtype(variable.dtype)
        and variable is not optimizer._learning_rate
        and all(variable is not average for average in _averages_of_weights(optimizer))
    ]


def _averages_of_weights(optimizer: keras.Optimizer) -> list[keras.Variable]:
    return list(getattr(optimizer, "_model_variables_moving_average", None) or [])
