"""Exchange of a step's gradients between the replicas and processes, and back to the replicas."""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, GradientAggregator, StepFactors, StepGradients
from tfdml.collectives.buckets import spread
from tfdml.strategies.observers.gradient_watch import GradientWatch
from tfdml.strategies.observers.noise_scale import NoiseScale
from tfdml.strategies.observers.outlier_watch import OutlierWatch
from tfdml.strategies.observers.replica_clock import ReplicaClock
from tfdml.strategies.observers.step_clock import StepClock
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.timeline.recording import GRADIENTS, SUMS


def sum_over_replicas(
    extended: ReplicaExtended, aggregator: GradientAggregator, gradients: StepGradients
) -> list[Gradient | None]:
    """Sums gradients over all replicas; every replica calls this, in replica context.

    Args:
        extended: The strategy's extended part.
        aggregator: The optimizer's aggregator.
        gradients: This replica's gradients; a value is None if a variable has no gradient.

    Returns:
        The sums in the same order, None where there was no gradient.
    """
    indices = [i for i, g in enumerate(gradients.values) if g is not None]
    result: list[Gradient | None] = [None] * len(gradients.values)
    if indices:
        watch = extended.observer(OutlierWatch)
        if watch is not None:
            gradients = dataclasses.replace(gradients, note_cut=watch.note)
        exchange = _by_replica if aggregator.per_replica else _by_process
        sums = exchange(extended, aggregator, gradients.at(indices))
        for i, total in zip(indices, sums, strict=True):
            result[i] = total
    return result


def _by_process(
    extended: ReplicaExtended, aggregator: GradientAggregator, gradients: StepGradients
) -> list[Gradient]:
    """Sums over this process's replicas first, so that each process sends one gradient.

    One of the process's devices sums, exchanges and distributes each bucket of gradients.
    """
    places = gradients.places or [extended.local_devices] * len(gradients.values)

    def merge(_, weight, *per_replica):
        _note_replicas(extended, per_replica)
        buckets = aggregator.buckets(gradients)
        replicas = spread(buckets, len(per_replica), range(extended.num_local_replicas))
        devices = [own[replica] for own, replica in zip(places, replicas, strict=True)]
        sums = [extended.local_sum(v, d) for v, d in zip(per_replica, devices, strict=True)]
        if aggregator.needs_weight:
            weight = tf.add_n(extended.parts_of(weight))
        local = dataclasses.replace(gradients, values=sums, devices=devices, weight=weight)
        clock = extended.observer(StepClock)
        if clock is not None:
            clock.note_gradients(local.values)
        ready = extended.recorder.note(GRADIENTS, local.values)
        sums = aggregator.aggregate(local)
        if clock is not None:
            clock.note_sums(sums)
        extended.recorder.note(SUMS, [*sums, *ready])
        _note_bytes(extended, aggregator, local)
        _observe_noise(extended, per_replica, sums, gradients.factors)
        return [extended.copied_to(total, own) for total, own in zip(sums, places, strict=True)]

    arguments = (gradients.weight, *gradients.values)
    return tf.distribute.get_replica_context().merge_call(merge, args=arguments)


def _by_replica(
    extended: ReplicaExtended, aggregator: GradientAggregator, gradients: StepGradients
) -> list[Gradient]:
    """Sums gradients with an aggregator in which each replica exchanges its own."""
    sums = aggregator.aggregate(gradients)
    count = len(sums)

    def merge(_, *both):
        _note_replicas(extended, both[:count])
        clock = extended.observer(StepClock)
        local, total = ([extended.parts_of(v) for v in b] for b in (both[:count], both[count:]))
        if clock is not None:
            clock.note_gradients(local)
            clock.note_sums(total)
        ready = extended.recorder.note(GRADIENTS, local)
        extended.recorder.note(SUMS, [*total, *ready])
        own = [extended.parts_of(value)[0] for value in both[:count]]
        _note_bytes(extended, aggregator, dataclasses.replace(gradients, values=own))
        _observe_noise(extended, both[:count], both[count:], gradients.factors)

    tf.distribute.get_replica_context().merge_call(merge, args=(*gradients.values, *sums))
    return sums


def note_kept(extended: ReplicaExtended, gradients: Sequence[Gradient | None]) -> None:
    """Passes gradients that a step accumulates, in replica context, to the session's `StepClock`.

    Args:
        extended: The strategy's extended part.
        gradients: This replica's gradients.
    """
    clock = extended.observer(StepClock)
    if clock is not None:

        def merge(_, *per_replica):
            clock.note_gradients([extended.parts_of(value) for value in per_replica])

        present = tuple(g for g in gradients if g is not None)
        tf.distribute.get_replica_context().merge_call(merge, args=present)


def watch_sums(
    extended: ReplicaExtended,
    common: Sequence[Gradient],
    own: Sequence[Gradient],
    factors: Callable[[], StepFactors],
) -> None:
    """Passes the sums of an update, in replica context, to the session's `GradientWatch`, if any.

    Args:
        extended: The strategy's extended part.
        common: Sums that are the same on all ranks.
        own: Sums that only this rank has.
        factors: Function that returns the loss scale and the learning rate.
    """
    watch = extended.observer(GradientWatch)
    if watch is None:
        return
    loss_scale, count = factors().loss_scale, len(common)

    def merge(_, *both):
        # The replicas of a process have the same sums.
        first = [extended.parts_of(value)[0] for value in both]
        squared = watch.squared_norm(first[:count], first[count:], loss_scale, watch.is_due())
        watch.note_squared_norm(squared)

    tf.distribute.get_replica_context().merge_call(merge, args=(*common, *own))


def _note_bytes(
    extended: ReplicaExtended, aggregator: GradientAggregator, gradients: StepGradients
) -> None:
    """Passes the bytes that this process sends to the session's `GradientWatch`, if any."""
    watch = extended.observer(GradientWatch)
    if watch is not None:
        sent = extended.aggregator_choice.sent_bytes(extended.collective, extended.options)
        watch.note_bytes(*sent.of_step(aggregator, gradients))


def _note_replicas(extended: ReplicaExtended, per_replica: Sequence) -> None:
    """Passes each replica's gradients to the session's `ReplicaClock`, if any."""
    clock = extended.observer(ReplicaClock)
    if clock is not None:
        parts = [extended.parts_of(v) for v in per_replica]
        rows = [share.rows for share in extended.shares]
        clock.note_gradients(list(zip(*parts, strict=True)), rows)


def _observe_noise(
    extended: ReplicaExtended,
    per_replica: Sequence,
    sums: Sequence,
    factors: Callable[[], StepFactors],
) -> None:
    """Passes the replicas' gradients and their sums to the session's `NoiseScale`, if any."""
    noise_scale = extended.observer(NoiseScale)
    if noise_scale is None:
        return
    own = [extended.parts_of(v) for v in per_replica]
    sums = [extended.parts_of(total)[0] for total in sums]
    accumulator = extended.session.accumulator
    rows = extended.shares[0].global_rows * (1 if accumulator is None else accumulator.steps)
    fractions = [share.fraction(tf.float64) for share in extended.shares]
    noise_scale.observe(own, sums, factors().loss_scale, rows, fractions)
