"""Summing what can be summed on the wire as it is: all-reduces, in one round or more."""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.compression.compressor import SummableCompressor
from tfdml.compression.error_feedback import State


def sum_in_rounds(
    collective: Collective,
    compressor: SummableCompressor,
    gradients: Sequence[tf.Tensor],
    memories: Sequence[State],
    states: Sequence[State],
    rates: tuple[tf.Tensor, tf.Tensor],
    name: str,
) -> tuple[list[tf.Tensor], tf.Tensor, list[State], list[State]]:
    """Sums a bucket of gradients over all processes.

    Args:
        collective: What moves the bytes.
        compressor: What makes tensors that are summed.
        gradients: This process's gradients.
        memories: What the compressor's memory keeps of each.
        states: The compressor's own state for each.
        rates: What gradients are multiplied with (the loss scale), and what their memories are, for
            a learning rate that has changed: float32, shape `[]`.
        name: What the exchanges are called.

    Returns:
        The sums, the same bits on all processes; whether all of them are finite; the new memories
        and the new states.
    """
    begin, end = _stages(compressor, collective.size)
    values, middles = begin(list(gradients), list(memories), *rates)
    rounds = compressor.reduce(values, states)
    payload, number = next(rounds), 0
    while True:
        total = collective.all_reduce(payload, f"{name}/round_{number}")
        try:
            payload, number = rounds.send(total), number + 1
        except StopIteration as stop:
            sums, states = stop.value
            break
    dtypes = tuple(g.dtype for g in gradients)
    sums, finite, memories = end(values, sums, middles, rates[0], dtypes)
    return sums, finite, memories, states


@functools.cache
def _stages(compressor: SummableCompressor, size: int) -> tuple[Callable, Callable]:
    """Returns what is done before and after the rounds: compiled, so numbers are read once."""
    memory = compressor.memory(size)

    def begin(gradients, memories, scale, kept):
        values, middles = [], []
        for gradient, state in zip(gradients, memories, strict=True):
            state = {key: value * kept for key, value in state.items()}
            value, middle = memory.compensate(tf.cast(gradient, tf.float32) / scale, state)
            values.append(value)
            middles.append(middle)
        return values, middles

    def end(values, sums, middles, scale, dtypes):
        # Each process answers for its part of what the sum leaves out.
        after = [
            memory.update(v, s / size, m) for v, s, m in zip(values, sums, middles, strict=True)
        ]
        sums = [s * scale for s in sums]
        finite = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(s)) for s in sums]))
        return [tf.cast(s, d) for s, d in zip(sums, dtypes, strict=True)], finite, after

    return tuple(tf.function(f, jit_compile=True) for f in (begin, end))
