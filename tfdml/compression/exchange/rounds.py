"""Sums of summable payloads by all-reduces, in one or more rounds."""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.compression.compressor import SummableCompressor
from tfdml.compression.error_feedback import Scales, State, compensated
from tfdml.compression.exchange.native_rounds import NativeRounds, operations


def sum_in_rounds(
    collective: Collective,
    compressor: SummableCompressor,
    gradients: Sequence[tf.Tensor],
    memories: Sequence[State],
    states: Sequence[State],
    scales: Scales,
    name: str,
    native: bool = True,
) -> tuple[list[tf.Tensor], tf.Tensor, list[State], list[State]]:
    """Sums a bucket of gradients over all processes.

    Args:
        collective: Collective that moves tensors between processes.
        compressor: Compressor whose payload the all-reduces sum.
        gradients: This process's gradients.
        memories: State of the compressor's memory for each gradient.
        states: The compressor's own state for each gradient.
        scales: The step's factors.
        name: Prefix of the exchanges' names.
        native: Whether to use the compiled operations where there are any; all processes or none
            must do so.

    Returns:
        The sums, bitwise identical on all processes; whether all of them are finite; the new
        memories; and the new states.
    """
    begin, between, end = _stages(compressor, collective.size, native)
    values, middles, payload, carried = begin(
        list(gradients), list(memories), list(states), *scales
    )
    for number, step in enumerate(between):
        totals = collective.all_reduce(payload, f"{name}/round_{number}")
        payload, carried = step(values, list(states), carried, totals)
    totals = collective.all_reduce(payload, f"{name}/round_{len(between)}")
    dtypes = tuple(g.dtype for g in gradients)
    return end(values, middles, list(states), carried, totals, scales.loss, dtypes)


@functools.cache
def _stages(
    compressor: SummableCompressor, size: int, native: bool
) -> tuple[Callable, Sequence[Callable], Callable]:
    """Returns the stages before, between and after the rounds."""
    if native and (library := operations(compressor)):
        rounds = NativeRounds(library, size)
        return rounds.begin, rounds.between, rounds.end
    return compiled_stages(compressor, size)


def compiled_stages(
    compressor: SummableCompressor, size: int
) -> tuple[Callable, Sequence[Callable], Callable]:
    """Returns the stages in TensorFlow operations.

    XLA compiles them, so that values are read and written once however many operations there are:
    each stage as a whole where the compressor's steps compile, else only the parts around them.
    """
    memory = compressor.memory(size)
    first, *between, last = compressor.steps
    compiled = functools.partial(tf.function, jit_compile=True)
    whole, part = (compiled, _uncompiled) if compressor.compiles else (_uncompiled, compiled)

    @part
    def before(gradients, memories, scale, memory_scale):
        return compensated(memory, gradients, memories, scale, memory_scale)

    @part
    def after(values, middles, sums, bounds, scale, dtypes):
        # Each process keeps its share of the sum's error.
        memories = [
            memory.update(v, s / size, m) for v, s, m in zip(values, sums, middles, strict=True)
        ]
        sums = [tf.cast(s * scale, d) for s, d in zip(sums, dtypes, strict=True)]
        return sums, _all_finite(bounds, scale), memories

    @whole
    def begin(gradients, memories, states, scale, memory_scale):
        values, middles = before(gradients, memories, scale, memory_scale)
        return values, middles, *first(values, states)

    @whole
    def end(values, middles, states, carried, totals, scale, dtypes):
        sums, states, bounds = last(values, states, carried, totals)
        return *after(values, middles, sums, bounds, scale, dtypes), states

    return begin, [whole(step) for step in between], end


def _all_finite(bounds: Sequence[tf.Tensor], scale: tf.Tensor) -> tf.Tensor:
    """Returns whether all values times the loss scale are finite: bool, shape `[]`."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(bound * scale)) for bound in bounds])


def _uncompiled(function: Callable) -> Callable:
    return function
