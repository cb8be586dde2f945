"""Optimizers' `apply`, which sums gradients over all replicas before it does anything else."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.aggregator import StepFactors, StepGradients
from tfdml.collectives.part_exchange import all_finite
from tfdml.collectives.sparse_gradients import add_up_rows, times
from tfdml.optimizers.touched_rows import TouchedRowsOptimizer
from tfdml.strategies.aggregation.accumulation import SharedGatheredGradients, restart
from tfdml.strategies.input.input_checks import check_gradients_match
from tfdml.strategies.keras_seam.current import (
    current_replicas,
    current_strategy,
    is_updating,
    updating,
)
from tfdml.strategies.keras_seam.keras_versions import distinct_name
from tfdml.strategies.keras_seam.step.compiled import hold_back
from tfdml.strategies.keras_seam.step.observed import observed_update
from tfdml.strategies.keras_seam.step.sharded_optimizers import get_parts
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.gradient_exchange import (
    note_kept,
    sum_over_replicas,
    watch_sums,
)
from tfdml.strategies.replicas.variable_places import devices_of
from tfdml.strategies.sharded.sharded_update import OptimizerParts
from tfdml.strategies.sharded.variable_parts import is_cut, is_dealt, is_empty
from tfdml.strategies.traced import traced


def apply(
    keras_apply: Callable,
    optimizer: keras.Optimizer,
    gradients: Sequence,
    given: Sequence | None,
) -> None:
    """Sums the gradients over all replicas, then applies them.

    Args:
        keras_apply: Keras's own `apply`.
        optimizer: The optimizer that was called, with or without a loss scale around it.
        gradients: A replica's gradients; outside of replicas, the whole job's.
        given: Their variables; None for all variables of the optimizer.
    """
    if current_strategy() is None:
        _apply_same_gradients(keras_apply, optimizer, list(gradients), given)
        return
    if is_updating():
        # Keras's own call of the optimizer inside a loss scale.
        keras_apply(optimizer, gradients, given)
        return
    update = functools.partial(_update, keras_apply, optimizer, given=given)
    if not hold_back(update, gradients):
        update(gradients)


def _update(
    keras_apply: Callable, optimizer: keras.Optimizer, gradients: Sequence, given: Sequence | None
) -> None:
    """Makes the update in every replica, or accumulates the gradients for a later one."""
    inner = inner_of(optimizer)
    extended = current_replicas()
    if extended is not None and extended.late_exchanges is not None:
        extended.late_exchanges.end_group()
    variables = list(_whole_variables(extended, inner) if given is None else given)
    grads = [with_known_shape(g, v, inner) for g, v in zip(gradients, variables, strict=True)]
    if extended is None:
        with updating(), observed_update(optimizer, grads):
            keras_apply(optimizer, grads, given)
        return
    accumulator, weight = extended.accumulator, extended.current_weight()
    if inner.gradient_accumulation_steps:
        if accumulator is None or accumulator.optimizer is not inner:
            raise ValueError(
                "`gradient_accumulation_steps` must belong to the optimizer that "
                "was passed to `compile`, in a call of `fit` or `train_on_batch`. Received: "
                f"{inner.name}, applied elsewhere. Sum the gradients of several steps yourself "
                "there."
            )
        if not accumulator.updates:
            note_kept(extended, grads)
            accumulator.keep(grads, variables, weight)
            return
        grads, weight = accumulator.take(grads, variables), accumulator.take_weight(weight)
    grads = _summed(extended, optimizer, grads, variables, weight)
    before = tf.convert_to_tensor(inner._iterations)
    parts = get_parts(extended, inner)
    if parts is None:
        with updating():
            keras_apply(optimizer, grads, variables)
    else:
        _update_parts(keras_apply, optimizer, parts, grads, variables)
    if inner is not optimizer and inner.gradient_accumulation_steps:
        restart(inner, before)


def _update_parts(
    keras_apply: Callable,
    optimizer: keras.Optimizer,
    parts: OptimizerParts,
    grads: Sequence,
    variables: Sequence,
) -> None:
    """Updates this rank's parts of variables, then gathers all new values.

    Args:
        keras_apply: Keras's own `apply`.
        optimizer: The optimizer.
        parts: The optimizer's parts.
        grads: Gradients of this rank's parts.
        variables: The whole variables.
    """
    parts.check_all_update([v for g, v in zip(grads, variables, strict=True) if g is not None])
    own = parts.of(variables)
    parts.refresh(own)
    # A table's rows that are not there are updated, too: otherwise TensorFlow would leave out the
    # exchange of their gradient, in which the other ranks wait.
    pairs = [(g, p) for g, p in zip(grads, own, strict=True) if not (is_cut(p) and is_empty(p))]
    with updating():
        keras_apply(optimizer, [g for g, _ in pairs], [p for _, p in pairs])
    present = [p for g, p in zip(grads, own, strict=True) if g is not None]
    parts.gather(present, f"weights/{distinct_name(optimizer)}")


def _whole_variables(
    extended: ReplicaExtended | None, optimizer: keras.Optimizer
) -> Sequence[keras.Variable]:
    return (
        optimizer._trainable_variables if extended is None else extended.whole_variables(optimizer)
    )


def _summed(
    extended: ReplicaExtended,
    outer: keras.Optimizer,
    grads: list,
    variables: list,
    weight: tf.Tensor | None,
) -> list:
    """Sums gradients over replicas; takes the maximum of those that replace their variable."""
    inner, label = inner_of(outer), f"gradients/{distinct_name(outer)}"
    if extended.compressor is not None:
        extended.compressor.check_optimizer(inner)
    replaces = [getattr(v, "overwrite_with_gradient", False) for v in variables]
    tables = [i for i, v in enumerate(variables) if is_dealt(v) and grads[i] is not None]
    parts = get_parts(extended, inner)
    given = StepGradients(
        [
            None if r or i in tables else g
            for i, (g, r) in enumerate(zip(grads, replaces, strict=True))
        ],
        distinct_names(inner, variables),
        label,
        functools.partial(_step_factors, outer, inner),
        places=_places(variables) if extended.options.pipeline is not None else (),
        cuts=() if parts is None else parts.cuts(variables),
        may_overflow=inner is not outer,
        weight=weight,
    )
    sums = sum_over_replicas(extended, extended.get_aggregator(outer), given)
    indices = [i for i, g in enumerate(grads) if replaces[i] and g is not None]
    largest = extended.largest(f"{label}/replacing", [grads[i] for i in indices])
    for i, value in zip(indices, largest, strict=True):
        sums[i] = value
    # The owners of a table's rows have their sums already.
    own = [grads[i] for i in tables]
    if tables and inner is not outer:
        own = _nan_unless_finite(own, label)
    for i, value in zip(tables, own, strict=True):
        sums[i] = value
    is_own = [i in tables or (given.cuts and given.cuts[i] is not None) for i in range(len(sums))]
    watched = [i for i, g in enumerate(sums) if g is not None and not replaces[i]]
    watch_sums(
        extended,
        [sums[i] for i in watched if not is_own[i]],
        [sums[i] for i in watched if is_own[i]],
        given.factors,
    )
    return sums


def _places(variables: Sequence[keras.Variable]) -> list[Sequence[str]]:
    """Returns the devices of each variable, one for each of this process's replicas."""
    return [devices_of(variable) for variable in variables]


def _nan_unless_finite(gradients: list, label: str) -> list:
    """Makes gradients of tables NaN on all ranks if one of them overflows on any rank.

    Args:
        gradients: Gradients of this rank's rows.
        label: Name of the exchange.
    """

    def merge(strategy: tf.distribute.Strategy, finite: Any) -> Any:
        extended = strategy.extended
        overflows = tf.cast(tf.logical_not(extended.parts_of(finite)[0]), tf.int32)
        votes = extended.collective.all_reduce([overflows[tf.newaxis]], f"{label}/table_overflow")
        return extended.on_all_devices(tf.where(votes[0][0] > 0, math.nan, 1.0))

    replica = tf.distribute.get_replica_context()
    factor = replica.merge_call(merge, args=(all_finite(gradients),))
    return [times(gradient, factor) for gradient in gradients]


def inner_of(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns an optimizer without the loss scale around it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _apply_same_gradients(
    original: Callable, outer: keras.Optimizer, grads: list, given: Sequence | None
) -> None:
    """Applies gradients outside of a step, where they are the whole job's, on every replica."""
    strategy, inner = outer._distribution_strategy, inner_of(outer)
    _refuse_tables(inner._trainable_variables if given is None else given, strategy.extended)
    check_gradients_match(grads, strategy.extended.collective)
    with strategy.scope():
        if not outer.built and given is not None:
            # Variables must be created outside of the replicas.
            outer.build(list(given))
        variables = list(_whole_variables(strategy.extended, inner) if given is None else given)
        grads = [with_known_shape(g, v, inner) for g, v in zip(grads, variables, strict=True)]
        parts = get_parts(strategy.extended, inner)
        if parts is not None:
            grads = parts.parts_of(grads, variables)

        def update(values: list) -> None:
            if parts is not None:
                _update_parts(original, outer, parts, values, variables)
                return
            with updating():
                original(outer, values, given)

        if not inner.gradient_accumulation_steps:
            strategy.run(update, args=(grads,))
            return
        gathered = SharedGatheredGradients(
            inner, variables if parts is None else parts.of(variables)
        )
        before = tf.convert_to_tensor(inner._iterations) + 0

        def take() -> None:
            strategy.run(update, args=(gathered.take(grads),))
            if inner is not outer:
                restart(inner, before)

        tf.cond(gathered.is_whole(), take, lambda: gathered.keep(grads))


def _refuse_tables(variables: Sequence, extended: ReplicaExtended) -> None:
    """Refuses updates outside of a step of tables that are dealt to the ranks.

    Raises:
        ValueError: If there is such a table.
    """
    for variable in filter(is_dealt, variables):
        raise ValueError(
            f"Gradients of a table that is divided among the ranks must be applied in a step, "
            f"where each rank has those of its rows. Received on rank {extended.collective.rank}: "
            f"an update of {variable.path} outside of one. Call `optimizer.apply` in a function "
            f"that `strategy.run` runs, or train by `fit`."
        )


def distinct_names(
    optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable]
) -> list[str]:
    """Returns the variables' paths, with a number appended to repeated ones.

    Args:
        optimizer: Optimizer in the order of whose variables paths are counted, None without one.
        variables: The variables.
    """
    counts: dict[str, int] = {}
    names: dict[int, str] = {}
    for variable in [*getattr(optimizer, "_trainable_variables", ()), *variables]:
        if id(variable) not in names:
            number = counts.get(variable.path, 0)
            counts[variable.path] = number + 1
            names[id(variable)] = f"{variable.path}#{number}" if number else variable.path
    return [names[id(variable)] for variable in variables]


def with_known_shape(gradient: Any, variable: keras.Variable, optimizer: keras.Optimizer) -> Any:
    """Returns a gradient of its variable's shape in which, if it is sparse, each row occurs once.

    In a graph, the shapes of some gradients are unknown: that of an embedding, and that of a dense
    layer's kernel if its inputs are sequences. A compressor would not take it.

    In code that XLA compiles, where the number of rows depends on the data, a sparse gradient
    becomes dense. A `TouchedRowsOptimizer`, which has another rule for rows without a gradient,
    gets it as it is and adds rows up itself: XLA gives wrong numbers if they are added up twice,
    because it takes padding for rows.

    Args:
        gradient: A dense or sparse gradient, or None.
        variable: Its variable.
        optimizer: The optimizer, without a loss scale around it.
    """
    if isinstance(gradient, tf.Tensor):
        gradient.set_shape(variable.shape)
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.constant(tuple(variable.shape), tf.int64)
    gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
    if not traced().compiled_whole:
        return add_up_rows(gradient)
    is_sparse = isinstance(optimizer, TouchedRowsOptimizer)
    return gradient if is_sparse else tf.convert_to_tensor(gradient)


def _step_factors(outer: keras.Optimizer, inner: keras.Optimizer) -> StepFactors:
    """Returns the loss scale, None without one, and the learning rate."""
    scale = None if inner is outer else tf.convert_to_tensor(outer.dynamic_scale)
    return StepFactors(scale, tf.convert_to_tensor(inner.learning_rate))
