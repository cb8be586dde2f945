"""Keras's optimizers on parts of variables: their slots, norms and averages of weights."""

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from tfdml.collectives.sparse_gradients import times
from tfdml.optimizers.layerwise import LayerwiseOptimizer
from tfdml.strategies.keras_seam.current import current_extended, get_extended
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.weight_sync import start_from_rank_0
from tfdml.strategies.sharded.sharded_update import (
    OptimizerParts,
    gather_row_norms,
    squared_norm,
    squared_norms_of_tables,
)
from tfdml.strategies.sharded.variable_parts import (
    PartList,
    check_optimizer_of_tables,
    is_cut,
    is_dealt,
)


def get_parts(
    extended: ReplicaExtended | None, optimizer: keras.Optimizer
) -> OptimizerParts | None:
    """Returns a built optimizer's parts; None if its state is not divided.

    Args:
        extended: The strategy's extended part; None outside of our strategies.
        optimizer: The optimizer, without a loss scale around it.

    Raises:
        ValueError: If its state should be divided, but is not.
    """
    if extended is None or not _divides(extended):
        return None
    if optimizer not in extended.optimizer_parts:
        raise ValueError(
            f"An optimizer must be built in the scope of a strategy with `sharding`, on the "
            f"model's variables. Received on rank {extended.collective.rank}: {optimizer.name}, "
            f"not built there. Create and compile it in `strategy.scope()`; in a custom loop, call "
            f"`optimizer.build(model.trainable_variables)` before the first step."
        )
    return extended.optimizer_parts[optimizer]


def _divides(extended: ReplicaExtended) -> bool:
    return extended.options.shards_optimizers and extended.collective.size > 1


def divide_when_built(optimizer: keras.Optimizer) -> None:
    """Makes optimizers of this one's class divide their variables when they are built.

    Each class has a `build` of its own, which makes its slots.
    """
    kind = type(optimizer)
    if issubclass(kind, keras.optimizers.LossScaleOptimizer) or _is_ours(kind.build):
        return
    build = kind.build

    @functools.wraps(build)
    def build_on_parts(self: keras.Optimizer, variables: Sequence) -> None:
        extended = get_extended(self._distribution_strategy)
        if extended is not None and not self.built:
            extended.variables_before_slots.setdefault(self, len(self.variables))
        # A class may inherit this function, and build the optimizer by calling that of its parent;
        # so may a loss scale, which has no slots.
        is_own_call = (
            extended is None
            or self.built
            or isinstance(self, keras.optimizers.LossScaleOptimizer)
            or self in extended.optimizer_parts
        )
        if not is_own_call and any(map(is_dealt, variables)):
            check_optimizer_of_tables(self)
        if is_own_call:
            build(self, variables)
        elif _divides(extended):
            _build_on_parts(build, self, extended, list(variables))
        elif any(map(is_dealt, variables)):
            _build_slots_of_parts(build, self, extended, variables)
        else:
            _build_same_slots(build, self, extended, variables)

    build_on_parts._tfdml_divides = True
    kind.build = build_on_parts


def _is_ours(build: Callable) -> bool:
    return getattr(build, "_tfdml_divides", False)


def _build_on_parts(
    build: Callable, optimizer: keras.Optimizer, extended: ReplicaExtended, variables: list
) -> None:
    strategy = optimizer._distribution_strategy
    with tf.init_scope(), strategy.scope(), extended.making_own_variables():
        parts = OptimizerParts(extended, optimizer, variables)
        extended.optimizer_parts[optimizer] = parts
        _build_slots(build, optimizer, extended, parts.variables)


def _build_slots_of_parts(
    build: Callable, optimizer: keras.Optimizer, extended: ReplicaExtended, variables: Sequence
) -> None:
    """Builds an optimizer whose slots belong to variables of which this rank has a part."""
    with tf.init_scope(), optimizer._distribution_strategy.scope(), extended.making_own_variables():
        _build_slots(build, optimizer, extended, variables)


def _build_same_slots(
    build: Callable, optimizer: keras.Optimizer, extended: ReplicaExtended, variables: Sequence
) -> None:
    """Builds an optimizer that has the same slots on all ranks.

    Nearly all slots begin as zeros, so ranks compare them in one message instead of broadcasting
    each: that would take as many round trips, and the time to send twice the model.
    """
    with extended.making_own_variables():
        build(optimizer, variables)
    if extended.collective.size > 1 and not extended.makes_own_variables:
        slots = optimizer.variables[extended.variables_before_slots[optimizer] :]
        with tf.init_scope(), extended.making_variable(f"slots of {optimizer.name}"):
            start_from_rank_0(slots, extended.collective)


def _build_slots(
    build: Callable, optimizer: keras.Optimizer, extended: ReplicaExtended, parts: Sequence
) -> None:
    if isinstance(optimizer, LayerwiseOptimizer):
        optimizer.gather_row_norms = functools.partial(gather_row_norms, extended, parts)
    build(optimizer, PartList(parts, optimizer))


def divide_all_again(extended: ReplicaExtended) -> None:
    """Divides the variables of all built optimizers among the present ranks, with new slots.

    Args:
        extended: The strategy's extended part.
    """
    for optimizer, number in list(extended.variables_before_slots.items()):
        if optimizer.built:
            variables = extended.whole_variables(optimizer)
            extended.optimizer_parts.pop(optimizer, None)
            if isinstance(optimizer, LayerwiseOptimizer):
                optimizer.gather_row_norms = None
            del optimizer._variables[number:]
            optimizer._trainable_variables_indices.clear()
            optimizer.built = False
            with optimizer._distribution_strategy.scope():
                optimizer.build(variables)


def _init(original: Callable) -> Callable:
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        divide_when_built(self)

    return __init__


def clip_gradients(
    optimizer: keras.Optimizer, gradients: Sequence, variables: Sequence[keras.Variable]
) -> list:
    """Clips gradients; parts by the norm of all ranks' gradients; called in replica context.

    Args:
        optimizer: The optimizer, without a loss scale around it.
        gradients: Gradients of `variables`, or None.
        variables: Variables, or this rank's parts of them.
    """
    parts = get_parts(current_extended(), optimizer)
    if optimizer.global_clipnorm and (parts is not None or any(map(is_dealt, variables))):
        norm = tf.sqrt(squared_norm(gradients, variables))
        factor = _clip_factor(norm, optimizer.global_clipnorm)
        return [None if g is None else times(g, factor) for g in gradients]
    tables = [
        i
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None and is_dealt(variable)
    ]
    if not optimizer.clipnorm or not tables:
        return optimizer._clip_gradients(gradients)
    own = [gradients[i] for i in tables]
    squares = squared_norms_of_tables(own, [variables[i] for i in tables])
    clipped = optimizer._clip_gradients(
        [None if i in tables else g for i, g in enumerate(gradients)]
    )
    for i, gradient, square in zip(tables, own, squares, strict=True):
        clipped[i] = times(gradient, _clip_factor(tf.sqrt(square), optimizer.clipnorm))
    return clipped


def _clip_factor(norm: tf.Tensor, limit: float) -> tf.Tensor:
    """Returns the factor that makes a norm at most the limit, as Keras computes it."""
    # The difference is 0, or NaN for a norm that is not finite.
    return limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)


def _overwrite_with_average(original: Callable) -> Callable:
    """Gives the model the averages of its weights, which their owners have."""

    def overwrite_with_average(self, variables):
        extended = get_extended(self._distribution_strategy)
        parts = get_parts(extended, self)
        if parts is None:
            return original(self, variables)
        own = parts.of(variables)
        original(self, own)
        strategy = self._distribution_strategy
        with strategy.scope():
            strategy.run(parts.gather, args=([p for p in own if is_cut(p)], "averages"))
        return None

    return overwrite_with_average


REPLACEMENTS: list[Replacement] = [
    (TFOptimizer, "__init__", _init),
    (TFOptimizer, "_overwrite_model_variables_with_average_value", _overwrite_with_average),
]
