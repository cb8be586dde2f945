"""Checks the choice of a compressor: cost model, trials, and agreement of all ranks."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compression import training_cases as cases
from tests.compression.aggregate import aggregate
from tests.strategies.compare import assert_close, assert_same_bits
from tfdml import compression
from tfdml.collectives.aggregator import sum_in_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import QSGD, Auto, DeepGradientCompression, Float16, PowerSGD
from tfdml.compression.auto.auto_aggregator import WINDOW, AutoAggregator
from tfdml.compression.auto.candidate_choice import CandidateChoice
from tfdml.compression.auto.cost_model import (
    Link,
    Traffic,
    exchange_seconds,
    traffic,
    transfer_seconds,
)

SHAPES, DTYPES = [(1000, 1000), (1000,)], [tf.float32, tf.float32]


@pytest.mark.parametrize("size", [2, 4])
def test_traffic_matches_its_formula(size):
    share = 2 * (size - 1) / size
    plain = traffic(None, SHAPES, DTYPES, size)
    assert plain.sent == share * 4 * 1_001_000
    assert plain.encoded == 0
    int8 = traffic(QSGD(8), SHAPES, DTYPES, size)
    assert int8.encoded == 4_000_000
    # A chunk consists of whole blocks of 512.
    assert int8.sent == pytest.approx(share * (1e6 * (1 + 4 / 512) + 4000), rel=1e-2)
    low_rank = traffic(PowerSGD(4), SHAPES, DTYPES, size)
    assert low_rank.sent == share * (4 * 4 * 2000 + 4000)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 8), (4, 8)])
def test_traffic_of_several_ranks_on_a_host(hosts, local):
    size = hosts * local
    ranks = Hosts(tuple(tuple(range(h * local, (h + 1) * local)) for h in range(hosts)))
    at_once = traffic(QSGD(8), SHAPES, DTYPES, size, hosts=ranks)
    by_hosts = traffic(QSGD(8), SHAPES, DTYPES, size, hosts=ranks, by_hosts=True)
    encoded = 1e6 * (1 + 4 / 512)
    ring = 2 * (size - 1) / size * 4000
    flat = (local * (size - local) + size - 1) / size
    assert at_once.sent == pytest.approx(flat * encoded + ring, rel=2e-2)
    assert by_hosts.sent == pytest.approx(2 * (hosts - 1) / hosts * encoded + ring, rel=2e-2)
    assert by_hosts.local == pytest.approx((local - 1) / local * (4e6 + encoded), rel=2e-2)
    # What a ring carries does not depend on how the ranks are divided.
    plain = traffic(None, SHAPES, DTYPES, size, hosts=ranks)
    assert plain == traffic(None, SHAPES, DTYPES, size)
    slow, fast = (Link(0.0, 1e6, bandwidth) for bandwidth in (1e6, 1e12))
    assert exchange_seconds(by_hosts, slow, 0.0) > exchange_seconds(by_hosts, fast, 0.0)


def test_all_reduces_take_the_time_that_was_measured_for_them():
    link = Link(0.0, 1e6, sum_rate=2e6)
    plain, low_rank, int8 = (traffic(c, SHAPES, DTYPES, 4) for c in (None, PowerSGD(4), QSGD(8)))
    assert transfer_seconds(plain, link) == pytest.approx(4 * 1_001_000 / 2e6)
    assert transfer_seconds(low_rank, link) == pytest.approx((4 * 4 * 2000 + 4000) / 2e6)
    # Its matrix goes from rank to rank, its vector in an all-reduce.
    matrix = int8.sent - 1.5 * 4000
    assert transfer_seconds(int8, link) == pytest.approx(matrix / 1e6 + 4000 / 2e6)


def test_exchange_time_is_the_longer_of_wire_and_codec_plus_one_bucket_of_the_other():
    link = Link(latency=0.001, bandwidth=1e6)
    sent = Traffic(sent=2e6, exchanges=8, encoded=10_000_000)
    assert exchange_seconds(sent, link, 0.0) == pytest.approx(2.008)
    assert exchange_seconds(sent, link, 1e-7) == pytest.approx(2.008 + 1.0 / 4)
    assert exchange_seconds(sent, link, 1e-6) == pytest.approx(10 + 2.008 / 4)


def choice(predicted: list[float], least: list[float] | None = None) -> CandidateChoice:
    names = ["none", "half", "quarter"][: len(predicted)]
    return CandidateChoice(names, predicted, least or [0.0] * len(predicted))


def run(made: CandidateChoice, steps: dict[int, float], windows: int = 4) -> list[int]:
    """Returns the choice in each window, given the step times."""
    chosen = []
    for _ in range(windows):
        chosen.append(made.current)
        made.after(steps[made.current])
    return [*chosen, made.current]


def test_choice_begins_with_the_best_prediction_and_tries_close_ones():
    assert run(choice([8.0, 4.5, 2.1]), {0: 9.0, 1: 2.0, 2: 2.6}) == [2, 0, 2, 2, 2]
    assert run(choice([8.0, 4.0, 2.1]), {0: 9.0, 1: 2.0, 2: 2.6}) == [2, 1, 0, 1, 1]


def test_slower_candidates_are_declined():
    assert run(choice([1.0, 0.9, 0.8]), {0: 1.0, 1: 1.2, 2: 1.3})[-1] == 0
    # Nor for a negligible gain.
    assert run(choice([1.0, 0.9]), {0: 1.0, 1: 0.99})[-1] == 0
    assert run(choice([1.0, 0.9]), {0: 1.0, 1: 0.9})[-1] == 1


def test_candidates_that_cannot_be_faster_are_not_tried():
    """Uncompressed, the transfer alone takes 8 s."""
    assert run(choice([8.0, 4.0, 2.0], [8.0, 3.9, 1.9]), {2: 2.5, 1: 5.0}) == [2, 2, 2, 2, 2]


def test_choice_is_stable_until_step_times_change():
    made = choice([1.0, 0.5])
    times = {0: 1.0, 1: 0.6}
    assert run(made, times, 3) == [1, 0, 1, 1]
    assert made.settled
    # One slow window may be chance.
    made.after(2.0)
    made.after(0.6)
    assert made.settled
    made.after(0.2)
    made.after(0.2)
    assert not made.settled
    assert made.current == 0
    assert made.after(0.15)
    assert made.current == 0


def test_trials_without_effect_become_rare():
    made = choice([1.0, 0.5])
    trials = 0
    for window in range(200):
        # Two slow windows, then two fast ones: the machine's load, whatever is chosen.
        trials += made.current == 0
        made.after((1.0 if window // 2 % 2 else 2.0) * (1.2, 1.0)[made.current])
    assert trials <= 8
    assert made.current == 1


class Clock(threading.local):
    """Clock of a simulated rank that only advances for declared costs."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> tf.Tensor:
        return tf.constant(self.seconds, tf.float64)


class Slow(Collective):
    """Collective whose transfers take simulated time."""

    def __init__(self, inner: Collective, clock: Clock, seconds_per_byte: float):
        super().__init__(inner.topology)
        self._inner, self._clock, self._seconds = inner, clock, seconds_per_byte

    def _wait(self, tensors) -> None:
        size = sum(t.shape.num_elements() * t.dtype.size for t in tensors)
        self._clock.seconds += self._seconds * size

    def all_reduce(self, tensors, name):
        self._wait(tensors)
        return self._inner.all_reduce(tensors, name)

    def all_gather(self, tensor, name):
        self._wait([tensor])
        return self._inner.all_gather(tensor, name)

    def all_to_all(self, tensor, name):
        self._wait([tensor])
        return self._inner.all_to_all(tensor, name)

    def broadcast(self, tensor, name, root=0):
        return self._inner.broadcast(tensor, name, root)


def test_ranks_agree_to_compress_on_a_slow_link(capfd):
    clock = Clock()

    def rank(collective):
        slow = Slow(collective, clock, 2e-7)  # 40 Mbit/s.
        aggregator = AutoAggregator(slow, Auto([QSGD(8)]), clock)
        gradient = tf.random.stateless_normal([300, 400], [1, collective.rank])
        for _ in range(3 * WINDOW):
            (total,) = aggregate(aggregator, [gradient], ["w"], "g")
        return aggregator.choices["g"], total.numpy()

    (one, first), (other, second) = run_ranks(2, rank)
    assert one.current == other.current == 1
    assert one.measured == other.measured
    assert one.predicted == other.predicted
    assert first.tobytes() == second.tobytes()
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2, "One line before, one after; rank 0 alone."
    assert "Predicted for a step's exchange: no compression" in lines[0]
    assert "Continues with QSGD(" in lines[1]


class Heavy(Float16):
    """Codec that takes simulated time."""

    clock: Clock
    static = False  # Not compiled: `encode` is called in every step.

    def encode(self, values, seed):
        self.clock.seconds += 0.1
        return super().encode(values, seed)


def test_fast_link_is_not_compressed():
    heavy = Heavy()
    heavy.clock = Clock()

    def rank(collective):
        fast = Slow(collective, heavy.clock, 1e-9)  # 8 Gbit/s.
        aggregator = AutoAggregator(fast, Auto([heavy]), heavy.clock)
        own = [tf.random.stateless_normal([300, 400], [1, collective.rank])]
        for _ in range(WINDOW):
            sums = aggregate(aggregator, own, ["w"], "g")
        plain = sum_in_buckets(collective, own, "plain")
        return aggregator.choices["g"], sums[0].numpy(), plain[0].numpy()

    for made, total, plain in run_ranks(2, rank):
        assert made.settled
        assert made.current == 0
        np.testing.assert_array_equal(total, plain)


def test_training_with_auto(ranks):
    (plain,) = ranks.run_sizes((1,), cases.train, None)[1]
    results = ranks(2).run(cases.train, Auto([QSGD(8)]))
    assert_same_bits(results)
    assert_close(plain["history"]["loss"], results[0]["history"]["loss"], rtol=0.05)


@pytest.mark.parametrize("candidates", [[], [DeepGradientCompression()], ["fp16"], [Auto()]])
def test_wrong_candidates(candidates):
    with pytest.raises(ValueError, match="`candidates` must"):
        Auto(candidates)


def test_auto_has_a_name_and_is_serialisable():
    auto = compression.get("auto")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(auto))
    assert repr(again) == repr(auto)
