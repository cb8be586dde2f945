"""Gradient aggregation by the fastest candidate; each candidate is a branch of the step's graph."""

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import (
    Gradient,
    GradientAggregator,
    PlainAggregator,
    StepGradients,
)
from tfdml.collectives.buckets import BUCKET_BYTES, Bucket
from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.collectives.part_exchange import PartAggregator
from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.compression.auto.auto import Auto
from tfdml.compression.auto.candidate_choice import CandidateChoice
from tfdml.compression.auto.cost_model import (
    Link,
    exchange_seconds,
    traffic,
    transfer_seconds,
)
from tfdml.compression.auto.measure import Clock, measure_codec, measure_link
from tfdml.compression.compressor import Compressor
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.compression.exchange.compressed_parts import CompressedPartAggregator
from tfdml.compression.exchange.to_owners import can_send_to_owners

# Steps per measurement; their median is used, because some may be outliers.
WINDOW = 5
# The link, and each codec's seconds per byte: measured once for all optimizers.
_measured: weakref.WeakKeyDictionary[Collective, tuple[Link, list[float]]]
_measured = weakref.WeakKeyDictionary()


class AutoAggregator(GradientAggregator):
    """Aggregator that sums this process's gradients by the candidate with the shortest steps.

    The candidates share each gradient's residual, so nothing is lost when another one is chosen;
    while no compression is chosen, the residual waits.

    Args:
        collective: Collective that moves tensors between processes.
        auto: Compressor that holds the candidates.
        clock: Function that returns the time; it times steps, links and codecs.
        bucket_bytes: Bytes of gradients that are exchanged together.
        hosts: Hosts and their ranks; None if that does not matter.
        to_owners: Whether each gradient is summed only where it is owned. Candidates that cannot
            do that are left out.
    """

    def __init__(
        self,
        collective: Collective,
        auto: Auto,
        clock: Clock = tf.timestamp,
        bucket_bytes: int = BUCKET_BYTES,
        hosts: Hosts | None = None,
        to_owners: bool = False,
    ):
        self._collective = collective
        self._hosts = hosts
        self._bucket_bytes = bucket_bytes
        self._clock = clock
        self._to_owners = to_owners
        candidates = auto.candidates
        if to_owners:
            candidates = [c for c in candidates if can_send_to_owners(c)]
        self._candidates: list[Compressor | None] = [None, *candidates]
        self._state: dict[str, tf.Variable] = {}
        self._parts = [
            _make_one(collective, c, bucket_bytes, hosts, to_owners, self._state, f"{number}/")
            for number, c in enumerate(self._candidates)
        ]
        # By the exchanges' label: one for each optimizer.
        self.choices: dict[str, CandidateChoice] = {}
        self._chosen: dict[str, tf.Variable] = {}

    @property
    def candidates(self) -> list[tuple[GradientAggregator, Compressor | None]]:
        """The candidates' aggregators, each with its compressor."""
        return list(zip(self._parts, self._candidates, strict=True))

    def of_chosen(self, label: str, numbers: Sequence[float]) -> tf.Tensor:
        """Returns the number of the candidate that is chosen now: float64, shape `[]`.

        Args:
            label: Name of the exchanges of gradients that `aggregate` has summed.
            numbers: A number for each candidate, in the order of `candidates`.
        """
        return tf.gather(tf.constant(numbers, tf.float64), self._chosen[label].read_value())

    @property
    def state(self) -> dict[str, tf.Variable]:
        """This process's own variables that are kept between steps, by name."""
        return dict(self._state)

    def state_bytes(self, gradients: StepGradients) -> dict[str, int]:
        """Returns the bytes of all candidates' state after a step; see `GradientAggregator`."""
        return {n: size for p in self._parts for n, size in p.state_bytes(gradients).items()}

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the state of an earlier job's ranks; see `GradientAggregator`."""
        for part in self._parts:
            part.restore(before)

    def buckets(self, gradients: StepGradients) -> list[Bucket]:
        """Returns the uncompressed buckets, which a branch may divide; see `GradientAggregator`."""
        return self._parts[0].buckets(gradients)

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums gradients by the chosen candidate; see `GradientAggregator`."""
        label = gradients.label
        if label not in self.choices:
            with tf.init_scope():
                self._begin(gradients)
        # Called once, outside the branches, because each of them is a graph of its own.
        factors = gradients.factors()
        given = dataclasses.replace(gradients, factors=lambda: factors)
        branches = [functools.partial(part.aggregate, given) for part in self._parts]
        chosen = self._chosen[label]
        sums = tf.switch_case(chosen.read_value(), branches)
        flat = tf.nest.flatten(sums, expand_composites=True)
        with tf.control_dependencies([t for t in flat if t is not None]):
            chosen.assign(self._after_step(label))
        return sums

    def _begin(self, gradients: StepGradients) -> None:
        """Measures the link and the codecs, predicts step times and makes the first choice."""
        label = gradients.label
        if self._collective not in _measured:
            codecs = [
                0.0 if c is None else measure_codec(self._collective, c, self._clock)
                for c in self._candidates
            ]
            link = measure_link(self._collective, self._clock, self._hosts)
            _measured[self._collective] = link, codecs
        link, codecs = _measured[self._collective]
        dense = [g for g in gradients.values if not isinstance(g, tf.IndexedSlices)]
        dense = [g for g in dense if g.shape.is_fully_defined()]
        shapes, dtypes = [g.shape.as_list() for g in dense], [g.dtype for g in dense]
        rest = (shapes, dtypes, self._collective.size, self._bucket_bytes)
        ways = [
            isinstance(part, CompressedAggregator) and part.sums_by_hosts(gradients)
            for part in self._parts
        ]
        sent = [
            traffic(c, *rest, self._hosts, by_hosts, self._to_owners)
            for c, by_hosts in zip(self._candidates, ways, strict=True)
        ]
        choice = CandidateChoice(
            ["no compression", *map(repr, self._candidates[1:])],
            [exchange_seconds(t, link, codec) for t, codec in zip(sent, codecs, strict=True)],
            [transfer_seconds(t, link) for t in sent],
        )
        self.choices[label] = choice
        self._chosen[label] = unmanaged_variable(tf.constant(choice.current))
        self._say(
            f"{self._collective.size} ranks, {link.latency * 1e3:.2f} ms, "
            f"{link.bandwidth * 8e-6:.0f} Mbit/s. Predicted for a step's exchange: "
            f"{_listed(choice.names, dict(enumerate(choice.predicted)))}. "
            f"Starts with {choice.names[choice.current]}."
        )

    def _after_step(self, label: str) -> tf.Tensor:
        """Records the step's time and returns the next step's candidate."""
        chosen = self._chosen[label]
        last, count = self._own("last", label, 0.0), self._own("count", label, 0)
        times = self._own("times", label, np.zeros(WINDOW))
        now, slot = self._clock(), count.read_value() % WINDOW
        new = tf.tensor_scatter_nd_update(times.read_value(), [[slot]], [now - last.read_value()])
        times.assign(new)
        last.assign(now)
        count.assign_add(1)

        def choose() -> tf.Tensor:
            median = tf.sort(new)[WINDOW // 2]
            (total,) = self._collective.all_reduce([median], f"auto/{label}")
            return tf.numpy_function(
                lambda seconds: self._choose(label, float(seconds)),
                [total / self._collective.size],
                tf.int32,
            )

        following = tf.cond(slot == WINDOW - 1, choose, lambda: chosen.read_value())
        return tf.reshape(following, [])

    def _choose(self, label: str, seconds: float) -> np.int32:
        choice = self.choices[label]
        if choice.after(seconds):
            self._say(
                f"Measured for a step: {_listed(choice.names, choice.measured)}. "
                f"Continues with {choice.names[choice.current]}."
            )
        return np.int32(choice.current)

    def _own(self, name: str, label: str, start) -> tf.Variable:
        key = f"auto/{name}/{label}"
        if key not in self._chosen:
            with tf.init_scope():
                dtype = tf.int64 if isinstance(start, int) else tf.float64
                self._chosen[key] = unmanaged_variable(tf.constant(start, dtype))
        return self._chosen[key]

    def _say(self, text: str) -> None:
        if self._collective.topology.is_chief:
            print(f'tfdml: compression="auto": {text}', flush=True)


def goes_to_owners(compressor: Compressor | None) -> bool:
    """Returns whether `make_aggregator` has an aggregator with `to_owners` for a compressor."""
    if isinstance(compressor, Auto):
        return any(map(can_send_to_owners, compressor.candidates))
    return compressor is None or can_send_to_owners(compressor)


def make_aggregator(
    collective: Collective,
    compressor: Compressor | None,
    bucket_bytes: int = BUCKET_BYTES,
    hosts: Hosts | None = None,
    to_owners: bool = False,
) -> GradientAggregator:
    """Creates the aggregator of an optimizer whose gradients are exchanged between processes.

    Args:
        collective: Collective that moves tensors between processes.
        compressor: Compressor of the gradients; None for no compression.
        bucket_bytes: Bytes of gradients that are exchanged together.
        hosts: Hosts and their ranks; None if that does not matter.
        to_owners: Whether each gradient is summed only where it is owned; see `goes_to_owners`.
    """
    if isinstance(compressor, Auto):
        return AutoAggregator(
            collective, compressor, bucket_bytes=bucket_bytes, hosts=hosts, to_owners=to_owners
        )
    return _make_one(collective, compressor, bucket_bytes, hosts, to_owners, {}, "")


def _make_one(
    collective: Collective,
    compressor: Compressor | None,
    bucket_bytes: int,
    hosts: Hosts | None,
    to_owners: bool,
    state: dict[str, tf.Variable],
    prefix: str,
) -> GradientAggregator:
    if to_owners and compressor is None:
        return PartAggregator(collective, bucket_bytes, prefix)
    if to_owners:
        return CompressedPartAggregator(collective, compressor, bucket_bytes, state, prefix)
    if compressor is None:
        return PlainAggregator(collective, bucket_bytes, prefix)
    return CompressedAggregator(collective, compressor, bucket_bytes, state, prefix, hosts)


def _listed(names: Sequence[str], seconds: dict[int, float]) -> str:
    return ", ".join(f"{names[i]} {1e3 * s:.1f} ms" for i, s in sorted(seconds.items()))
