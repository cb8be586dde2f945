"""The exchange of a step's gradients: replicas to process, process to processes, and back."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, GradientAggregator
from tfdml.strategies.extended import ReplicaExtended

# Returns the loss scale (None for 1) and the learning rate of the step.
Rates = Callable[[], tuple[tf.Tensor | None, tf.Tensor]]


def sum_over_replicas(
    extended: ReplicaExtended,
    aggregator: GradientAggregator,
    label: str,
    gradients: Sequence[Gradient | None],
    names: Sequence[str],
    rates: Rates,
) -> list[Gradient | None]:
    """Sums gradients over all replicas; called in replica context, by every replica.

    Args:
        extended: The strategy's extended part.
        aggregator: The optimizer's aggregator.
        label: The name of the exchange.
        gradients: This replica's gradients, in the order of the layers; None where a variable
            has none.
        names: Their variables' paths.
        rates: Returns the loss scale and the learning rate.

    Returns:
        The sums, None where there was none.
    """
    places = [i for i, g in enumerate(gradients) if g is not None]
    if not places:
        return list(gradients)
    given, paths = [gradients[i] for i in places], [names[i] for i in places]
    exchange = _by_replica if aggregator.per_replica else _by_process
    sums = exchange(extended, aggregator, label, given, paths, rates)
    result: list[Gradient | None] = [None] * len(gradients)
    for i, total in zip(places, sums, strict=True):
        result[i] = total
    return result


def _by_process(
    extended: ReplicaExtended,
    aggregator: GradientAggregator,
    label: str,
    gradients: list[Gradient],
    names: list[str],
    rates: Rates,
) -> list[Gradient]:
    """Adds up the replicas of this process first, so that a process sends one gradient."""

    def merge(_, *per_replica):
        local = [extended.local_sum(v) for v in per_replica]

        def exchange() -> list[Gradient]:
            given = rates() if aggregator.uses_rates else ()
            return aggregator.aggregate(local, names, label, *given)

        sums = exchange() if extended.clock is None else extended.clock.timed(local, exchange)
        _observe_noise(extended, per_replica, sums, rates)
        return [extended.on_all_devices(total) for total in sums]

    return tf.distribute.get_replica_context().merge_call(merge, args=gradients)


def _by_replica(
    extended: ReplicaExtended,
    aggregator: GradientAggregator,
    label: str,
    gradients: list[Gradient],
    names: list[str],
    rates: Rates,
) -> list[Gradient]:
    """Lets each replica exchange its own gradients."""
    sums = aggregator.aggregate(gradients, names, label, *rates())

    def merge(_, *both):
        _observe_noise(extended, both[: len(gradients)], both[len(gradients) :], rates)

    tf.distribute.get_replica_context().merge_call(merge, args=(*gradients, *sums))
    return sums


def _observe_noise(
    extended: ReplicaExtended, per_replica: Sequence, sums: Sequence, rates: Rates
) -> None:
    """Gives `noise_scale`, if there is one, the replicas' gradients and their sums."""
    if extended.noise_scale is None or extended.shares is None:
        return
    own = [extended.parts_of(v) for v in per_replica]
    sums = [extended.parts_of(total)[0] for total in sums]
    steps = 1 if extended.accumulator is None else extended.accumulator.steps
    rows = extended.shares[0].global_rows * steps
    extended.noise_scale.observe(own, sums, rates()[0], rows)
