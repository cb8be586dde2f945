"""The exchange of a step's gradients: replicas to process, process to processes, and back."""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, GradientAggregator, Rates, StepGradients
from tfdml.collectives.buckets import spread
from tfdml.strategies.extended import ReplicaExtended
from tfdml.strategies.noise_scale import NoiseScale
from tfdml.strategies.step_clock import StepClock


def sum_over_replicas(
    extended: ReplicaExtended, aggregator: GradientAggregator, gradients: StepGradients
) -> list[Gradient | None]:
    """Sums gradients over all replicas; called in replica context, by every replica.

    Args:
        extended: The strategy's extended part.
        aggregator: The optimizer's aggregator.
        gradients: This replica's; a value is None where a variable has none.

    Returns:
        The sums, None where there was none.
    """
    places = [i for i, g in enumerate(gradients.values) if g is not None]
    result: list[Gradient | None] = [None] * len(gradients.values)
    if places:
        exchange = _by_replica if aggregator.per_replica else _by_process
        sums = exchange(extended, aggregator, gradients.at(places))
        for i, total in zip(places, sums, strict=True):
            result[i] = total
    return result


def _by_process(
    extended: ReplicaExtended, aggregator: GradientAggregator, gradients: StepGradients
) -> list[Gradient]:
    """Adds up the replicas of this process first, so that a process sends one gradient.

    Each bucket of gradients is summed, exchanged and handed out by one of the process's devices.
    """

    def merge(_, *per_replica):
        buckets = aggregator.buckets(gradients)
        devices = spread(buckets, len(per_replica), extended.local_devices)
        sums = [extended.local_sum(v, d) for v, d in zip(per_replica, devices, strict=True)]
        local = dataclasses.replace(gradients, values=sums, devices=devices)
        clock = extended.observer(StepClock)
        if clock is not None:
            clock.note_gradients(local.values)
        sums = aggregator.aggregate(local)
        if clock is not None:
            clock.note_sums(sums)
        _observe_noise(extended, per_replica, sums, gradients.rates)
        return [extended.on_all_devices(total) for total in sums]

    return tf.distribute.get_replica_context().merge_call(merge, args=gradients.values)


def _by_replica(
    extended: ReplicaExtended, aggregator: GradientAggregator, gradients: StepGradients
) -> list[Gradient]:
    """Lets each replica exchange its own gradients."""
    sums = aggregator.aggregate(gradients)
    count = len(sums)

    def merge(_, *both):
        clock = extended.observer(StepClock)
        if clock is not None:
            local, total = ([extended.parts_of(v) for v in b] for b in (both[:count], both[count:]))
            clock.note_gradients(local)
            clock.note_sums(total)
        _observe_noise(extended, both[:count], both[count:], gradients.rates)

    tf.distribute.get_replica_context().merge_call(merge, args=(*gradients.values, *sums))
    return sums


def _observe_noise(
    extended: ReplicaExtended, per_replica: Sequence, sums: Sequence, rates: Callable[[], Rates]
) -> None:
    """Gives the session's `NoiseScale`, if there is one, the replicas' gradients and their sums."""
    noise_scale = extended.observer(NoiseScale)
    if noise_scale is None:
        return
    own = [extended.parts_of(v) for v in per_replica]
    sums = [extended.parts_of(total)[0] for total in sums]
    accumulator = extended.session.accumulator
    rows = extended.shares[0].global_rows * (1 if accumulator is None else accumulator.steps)
    noise_scale.observe(own, sums, rates().loss_scale, rows)
