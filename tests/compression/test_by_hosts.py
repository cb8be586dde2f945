"""Checks sums in two levels on simulated ranks: float32 within hosts, encoded between them."""

import threading
import types
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.compression.aggregate import aggregate
from tests.compression.test_compressed_aggregator import BUCKET, NAMES, SHAPES, gradients
from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.collectives.simulated import SimulatedCollective, run_ranks
from tfdml.compression import (
    QSGD,
    BFloat16,
    DeepGradientCompression,
    Float16,
    NaturalCompression,
    OneBit,
    TernGrad,
    TopK,
)
from tfdml.compression.exchange import way_choice
from tfdml.compression.exchange.by_hosts import can_sum_by_hosts, sum_by_hosts
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.compression.exchange.redistribution import without_hosts
from tfdml.compression.exchange.way_choice import is_faster_by_hosts

TWO_BY_TWO = Hosts(((0, 1), (2, 3)))
INTERLEAVED = Hosts(((0, 2), (1, 3)))
UNEVEN = Hosts(((0, 1), (2,)))
EVEN_CODECS = [
    Float16(),
    QSGD(8),
    QSGD(4),
    OneBit(),
    TernGrad(),
    TopK(0.1),
    pytest.param(BFloat16(), marks=pytest.mark.slow),
    pytest.param(NaturalCompression(), marks=pytest.mark.slow),
    pytest.param(QSGD(8, stochastic=True), marks=pytest.mark.slow),
    pytest.param(DeepGradientCompression(0.1), marks=pytest.mark.slow),
]


def always(*_) -> bool:
    """Chooses two levels."""
    return True


def run(
    compressor,
    hosts: Hosts,
    steps: int,
    make: Callable = gradients,
    before: Sequence[dict] | None = None,
    choose: Callable = always,
    **options,
) -> list[tuple[list, dict]]:
    """Returns for each simulated rank the sums of some steps, and its state."""

    def rank(collective: Collective):
        aggregator = CompressedAggregator(
            collective, compressor, BUCKET, hosts=hosts, choose_hosts=choose
        )
        if before is not None:
            aggregator.restore(before)
        sums = [
            [
                t.numpy()
                for t in aggregate(aggregator, make(collective.rank, step), NAMES, "g", **options)
            ]
            for step in range(steps)
        ]
        return sums, {name: v.numpy() for name, v in aggregator.state.items()}

    return run_ranks(sum(map(len, hosts.ranks)), rank)


@pytest.mark.parametrize("hosts", [TWO_BY_TWO, INTERLEAVED], ids=["2x2", "interleaved"])
@pytest.mark.parametrize("compressor", EVEN_CODECS, ids=repr)
def test_sums_are_bit_identical_on_all_ranks(compressor, hosts):
    (first, _), *others = run(compressor, hosts, 3)
    for other, _ in others:
        for a, b in zip(sum(first, []), sum(other, []), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("compressor", [QSGD(4), OneBit()], ids=repr)
def test_sums_are_bit_identical_on_uneven_hosts(compressor):
    (first, _), *others = run(compressor, UNEVEN, 3)
    for other, _ in others:
        for a, b in zip(sum(first, []), sum(other, []), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("hosts", [TWO_BY_TWO, INTERLEAVED, UNEVEN], ids=["2x2", "mixed", "2+1"])
@pytest.mark.parametrize("compressor", [QSGD(4), OneBit()], ids=repr)
def test_hosts_are_the_ranks_of_a_smaller_job(compressor, hosts):
    """Two hosts give the bits of two ranks that have their hosts' sums, with error feedback."""

    def summed(host: int, step: int) -> list[tf.Tensor]:
        own = [gradients(rank, step) for rank in hosts.ranks[host]]
        return [tf.add_n(group) for group in zip(*own, strict=True)]

    def rank(collective: Collective) -> list:
        aggregator = CompressedAggregator(collective, compressor, BUCKET)
        own = [summed(collective.rank, step) for step in range(4)]
        return [[t.numpy() for t in aggregate(aggregator, g, NAMES, "g")] for g in own]

    expected = run_ranks(2, rank)[0]
    found = run(compressor, hosts, 4)[0][0]
    for i in (0, 2, 4):  # The others are not compressed: there, ranks are added in another order.
        for step in range(4):
            np.testing.assert_array_equal(found[step][i], expected[step][i])


def test_an_overflow_on_any_rank_leaves_all_state_as_it_was():
    def overflowing(rank: int, step: int) -> list[tf.Tensor]:
        own = gradients(rank, step)
        # Rank 1 owns nothing on uneven hosts.
        return [g * np.inf if step == 1 and rank == 1 else g for g in own]

    for hosts in (TWO_BY_TWO, UNEVEN):
        before = run(QSGD(4), hosts, 1)
        after = run(QSGD(4), hosts, 2, overflowing)
        for (_, old), (sums, new) in zip(before, after, strict=True):
            assert not np.isfinite(sums[1][0]).all()
            assert old.keys() == new.keys()
            for name, value in old.items():
                np.testing.assert_array_equal(new[name], value)


def test_each_encoded_value_leaves_a_host_once(monkeypatch):
    sent: list[tuple[int, int, int]] = []
    exchange = SimulatedCollective._exchange

    def counted(self, name: str, part) -> list:
        if name.endswith(("/to_owner", "/to_all")):  # A row of bytes for each member.
            own = self._members[self.rank]
            sent.extend((own, other, int(part.shape[1])) for other in self._members)
        return exchange(self, name, part)

    monkeypatch.setattr(SimulatedCollective, "_exchange", counted)

    def leaves_host_0(choose: Callable) -> int:
        def rank(collective: Collective) -> None:
            aggregator = CompressedAggregator(
                collective, QSGD(8), 1 << 20, hosts=TWO_BY_TWO, choose_hosts=choose
            )
            aggregate(aggregator, gradients(collective.rank, 0), NAMES, "g")

        sent.clear()
        run_ranks(4, rank)
        return sum(size for own, other, size in sent if own < 2 <= other)

    values = sum(int(np.prod(SHAPES[i])) for i in (0, 2, 4))
    encoded = QSGD(8).row_bytes(-(-values // 512) * 512)
    by_hosts = leaves_host_0(always)
    assert encoded <= by_hosts < 1.2 * encoded  # Chunks are whole blocks.
    # At once it is L(N-L)/N, and as much of the sums.
    assert leaves_host_0(lambda *_: False) == 2 * by_hosts


def test_the_way_is_decided_once_and_restored():
    calls = []

    def choose(*_) -> bool:
        calls.append(True)
        return True

    before = [state for _, state in run(QSGD(4), TWO_BY_TWO, 3, choose=choose)]
    assert len(calls) == 4  # Once on each rank.
    # A restored job does not measure again: it could decide otherwise, and get other bits.
    (sums, _), *_ = run(QSGD(4), TWO_BY_TWO, 1, _from(3), before, choose=lambda *_: 1 / 0)
    (whole, _), *_ = run(QSGD(4), TWO_BY_TWO, 4)
    for a, b in zip(sums[0], whole[3], strict=True):
        assert a.tobytes() == b.tobytes()


def _from(first: int) -> Callable:
    return lambda rank, step: gradients(rank, step + first)


def _nothing(rank: int, step: int) -> list[tf.Tensor]:
    return [tf.zeros(s) for s in SHAPES]


ELSEWHERE = {
    "2x2 to 2+1": (TWO_BY_TWO, UNEVEN),
    "2+1 to 2x2": (UNEVEN, TWO_BY_TWO),
    "2x2 to interleaved": (TWO_BY_TWO, INTERLEAVED),
    "2x2 to one host": (TWO_BY_TWO, Hosts(((0, 1, 2, 3),))),
    "three ranks at once to 2x2": (Hosts(((0, 1, 2),)), TWO_BY_TWO),
    "4 hosts to 2x2": (Hosts(((0,), (1,), (2,), (3,))), TWO_BY_TWO),
}


@pytest.mark.parametrize(
    "compressor", [pytest.param(QSGD(2), marks=pytest.mark.slow), OneBit()], ids=repr
)
@pytest.mark.parametrize(("old", "new"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_nothing_waiting_is_lost_on_other_hosts(compressor, old, new):
    """Residuals of two steps arrive when ranks on other hosts continue without gradients."""
    before = run(compressor, old, 2)
    size = sum(map(len, old.ranks))
    after = run(compressor, new, 12, _nothing, [state for _, state in before])
    for i in (0, 2, 4):
        true = sum(gradients(r, s)[i].numpy() for r in range(size) for s in range(2))
        missing = true - sum(sums[i] for sums in before[0][0])
        received = sum(sums[i] for sums in after[0][0])
        assert np.linalg.norm(missing - received) < 0.05 * np.linalg.norm(missing)


def test_momentum_that_has_not_been_sent_is_kept_on_other_hosts():
    codec = DeepGradientCompression(0.1)
    before = [state for _, state in run(codec, TWO_BY_TWO, 3)]
    flat = without_hosts(before)
    slices = [n for n in before[0] if n.startswith("velocity/")]
    total = sum(float(state[n].sum()) for state in before for n in slices)
    again = sum(float(state[f"velocity/{NAMES[i]}"].sum()) for state in flat for i in (0, 2, 4))
    assert again == pytest.approx(total, rel=1e-5)


def test_clipped_gradients_are_summed_at_once():
    # Clipping needs the norm of a rank's whole gradient.
    clipped = DeepGradientCompression(0.1, clip_norm=1.0)
    assert can_sum_by_hosts(DeepGradientCompression(0.1), TWO_BY_TWO)
    assert not can_sum_by_hosts(clipped, TWO_BY_TWO)
    # A rank without slices cannot know how many bytes the others get.
    assert not can_sum_by_hosts(TopK(0.1), UNEVEN)
    assert not can_sum_by_hosts(QSGD(8), Hosts(((0,), (1,))))
    assert not can_sum_by_hosts(QSGD(8), Hosts(((0, 1),)))


def test_whole_numbers_are_summed_exactly():
    def whole(rank: int, step: int) -> list[tf.Tensor]:
        generator = np.random.default_rng([rank, step])
        return [tf.constant(generator.integers(-9, 9, s).astype("float32")) for s in SHAPES]

    for hosts in (TWO_BY_TWO, UNEVEN):
        size = sum(map(len, hosts.ranks))
        sums = run(Float16(), hosts, 2, whole)[0][0]
        for step, found in enumerate(sums):
            for i, total in enumerate(found):
                true = sum(whole(rank, step)[i].numpy() for rank in range(size))
                np.testing.assert_array_equal(total, true)


@pytest.mark.parametrize(
    ("seconds", "chosen"), [(0.5, True), (0.85, True), (0.95, False), (1.2, False)]
)
def test_sums_by_hosts_must_be_clearly_faster(seconds, chosen):
    clock = threading.local()

    def now() -> float:
        return getattr(clock, "now", 0.0)

    def step(way: Callable, *_) -> Callable:
        def exchange(number: tf.Tensor) -> tf.Tensor:
            clock.now = now() + (seconds if way.func is sum_by_hosts else 1.0)
            return tf.identity(number)

        return exchange

    with (
        mock.patch.object(way_choice, "_step", step),
        mock.patch.object(way_choice, "time", types.SimpleNamespace(perf_counter=now)),
    ):
        shapes = [(64, 64)]
        choices = run_ranks(4, lambda c: is_faster_by_hosts(c, TWO_BY_TWO, QSGD(8), shapes))
    assert choices == [chosen] * 4
