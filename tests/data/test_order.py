"""Checks the order of an epoch: each record once, for any number of workers, from any position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data.order import Bucketed, Layout, Sequential, Shuffled, permutation, scattered
from tfdml.data.read.fetching import Spans
from tfdml.data.read.sharding import Batches
from tfdml.row_split import LocalReplicas


@st.composite
def layouts(draw) -> Layout:
    blocks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    shards = draw(st.lists(st.integers(0, 3), min_size=len(blocks), max_size=len(blocks)))
    # Some shards may have no blocks.
    return Layout(np.array(blocks, np.int64), np.cumsum(np.array(shards) // 2))


@st.composite
def orders(draw):
    layout = draw(layouts())
    options = {
        "layout": layout,
        "seed": draw(st.integers(0, 2**40)),
        "epoch": draw(st.integers(0, 5)),
        "window": draw(st.integers(1, 60)),
        "shards_at_once": draw(st.integers(1, 4)),
        "keep_shards": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["sequential", "shuffled", "bucketed"]))
    if kind == "sequential":
        return Sequential(layout)
    if kind == "shuffled":
        return Shuffled(**options)
    lengths = np.random.default_rng(0).integers(1, 50, layout.records)
    return Bucketed(lengths, draw(st.integers(1, 9)), **options)


@given(orders(), st.integers(1, 17), st.data())
@settings(max_examples=150, deadline=None)
def test_every_record_comes_once_from_any_position(order, step, data):
    whole = order.ids(0, len(order))
    assert sorted(whole) == list(range(len(order)))
    begin = data.draw(st.integers(0, len(order)))
    end = data.draw(st.integers(begin, len(order) + step))
    np.testing.assert_array_equal(order.ids(begin, end), whole[begin:end])


@given(
    orders(),
    st.integers(1, 20),
    st.sampled_from(["exact", "drop", "pad"]),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 40),
)
@settings(max_examples=200, deadline=None)
def test_global_batches_are_the_same_for_any_number_of_workers(
    order, batch_size, end, processes, local, resumed
):
    batches = Batches(batch_size, end)
    alone, replicas = LocalReplicas(), processes * local
    workers = [LocalReplicas(r * local, local, replicas) for r in range(processes)]
    first = min(resumed, len(order))
    left = len(order) - first
    steps = batches.steps(left)
    used = []
    for step in range(steps):
        whole = batches.rows(order, first, step, alone)
        parts = [batches.rows(order, first, step, worker) for worker in workers]
        np.testing.assert_array_equal(np.concatenate([p.ids for p in parts]), whole.ids)
        np.testing.assert_array_equal(np.concatenate([p.weights for p in parts]), whole.weights)
        for worker, part in zip(workers, parts, strict=True):
            assert bool(len(part.ids)) == (step < batches.own_steps(left, worker)) or (
                batch_size < replicas
            )
        used.append(whole.ids[whole.weights > 0])
    used = np.concatenate([np.empty(0, np.int64), *used])
    wanted = order.ids(first, first + left // batch_size * batch_size if end == "drop" else 10**9)
    assert sorted(used) == sorted(wanted)


@given(
    orders(),
    st.integers(1, 20),
    st.sampled_from(["exact", "drop", "pad"]),
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(0, 8),
    st.integers(1, 8),
)
@settings(max_examples=100, deadline=None)
def test_span_equals_its_consecutive_batches(
    order, batch_size, end, processes, resumed, begin, count
):
    batches = Batches(batch_size, end)
    first = min(resumed, len(order))
    stop = min(begin + count, batches.steps(len(order) - first))
    for rank in range(processes):
        worker = LocalReplicas(rank, 1, processes)
        span = batches.span(order, first, min(begin, stop), stop, worker)
        steps = [batches.rows(order, first, k, worker) for k in range(min(begin, stop), stop)]
        for field in ("ids", "weights", "positions"):
            joined = np.concatenate([[], *(getattr(rows, field) for rows in steps)])
            np.testing.assert_array_equal(getattr(span, field), joined)
            assert (
                getattr(span, field).dtype
                == getattr(batches.rows(order, 0, 0, worker), field).dtype
            )


@given(st.integers(0, 7), st.integers(0, 2000))
def test_spans_cut_all_batches_and_begin_with_one(power, steps):
    spans = Spans(2**power)
    count = spans.count(steps)
    bounds = [spans.begin(n) for n in range(count + 1)]
    assert bounds[0] == 0
    assert bounds[-1] >= steps
    assert count == 0 or bounds[-2] < steps
    sizes = np.diff(bounds)
    assert (sizes <= 2**power).all()
    assert sizes[:1].tolist() in ([], [1])


def test_spans_hold_many_small_records_and_few_large_ones():
    assert Spans.for_batches(256, 200.0).batches == 64
    assert Spans.for_batches(256, 20_000.0).batches == 1
    assert Spans.for_batches(8, 100_000.0).batches == 8
    assert Spans.for_batches(100_000, 8.0).batches == 1


@given(layouts(), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_a_window_comes_from_few_blocks(layout, seed):
    window = 10
    order = Shuffled(layout, seed, 0, window, shards_at_once=1)
    block = np.repeat(np.arange(len(layout.block_records)), layout.block_records)
    for begin in range(0, len(order), window):
        ids = order.ids(begin, begin + window)
        shards = layout.block_shard[block[ids]]
        touched = len(np.unique(block[ids]))
        # A window over consecutive blocks only cuts those at its two ends.
        assert sum(layout.block_records[np.unique(block[ids])]) <= window + 2 * 9
        assert len(np.unique(shards)) <= touched <= window


@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_may_keep_its_shards(workers):
    """A worker reads its part of the files in all epochs, and little of its neighbours' part."""
    layout = Layout(np.full(1280, 10), np.repeat(np.arange(128), 10))
    parts = {}
    for keep_shards in (False, True):
        blocks = [set() for _ in range(workers)]
        for epoch in range(6):
            order = Shuffled(layout, 3, epoch, 1600, 16, keep_shards)
            for rank, own in enumerate(blocks):
                rows = Batches(512).span(order, 0, 0, 25, LocalReplicas(rank, 1, workers))
                own |= set((rows.ids // 10).tolist())
        parts[keep_shards] = [len(own) / 1280 for own in blocks]
    assert max(parts[True]) < 1 / workers + 0.1
    assert np.mean(parts[False]) > 1 / workers + 0.15


def test_kept_shards_are_mixed_from_all_parts_of_the_files():
    layout = Layout(np.full(640, 10), np.repeat(np.arange(64), 10))
    first, second = (Shuffled(layout, 3, epoch, 1600, 16, True).ids(0, 1600) for epoch in (0, 1))
    for ids in (first, second):
        # 1,600 positions come from 16 shards: one of each 4 neighbours.
        assert sorted(np.unique(ids // 100) // 4) == list(range(16))
    assert set(first // 100) != set(second // 100)


def test_epochs_and_seeds_differ():
    layout = Layout(np.full(20, 10), np.repeat(np.arange(4), 5))
    first, again, other_epoch, other_seed = (
        Shuffled(layout, seed, epoch, 50, 2).ids(0, 200)
        for seed, epoch in [(1, 0), (1, 0), (1, 1), (2, 0)]
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other_epoch).mean() > 0.9
    assert (first != other_seed).mean() > 0.9


def test_orders_do_not_change_between_versions():
    """A resumed run must have its original order, so these numbers must never change."""
    assert permutation(8, 1, 2).tolist() == [2, 7, 3, 1, 5, 6, 0, 4]
    assert scattered(np.arange(8), 8, 1, 2).tolist() == [1, 4, 7, 2, 5, 3, 6, 0]
    order = Shuffled(Layout(np.full(4, 3), np.repeat(np.arange(2), 2)), 7, 1, 6, 2)
    assert order.ids(0, 12).tolist() == [2, 1, 6, 7, 8, 0, 10, 11, 3, 5, 4, 9]


def test_shuffled_order_is_well_mixed():
    layout = Layout(np.full(100, 10), np.repeat(np.arange(10), 10))
    ids = Shuffled(layout, 0, 0, 1000, 10).ids(0, 1000)
    correlation = np.corrcoef(ids, np.arange(1000))[0, 1]
    assert abs(correlation) < 0.1


def test_buckets_hold_similar_lengths():
    lengths = np.random.default_rng(0).integers(1, 1000, 640)
    layout = Layout(np.full(64, 10), np.zeros(64, np.int64))
    common = {"layout": layout, "seed": 0, "epoch": 0, "window": 320, "shards_at_once": 1}
    spread = {}
    for name, order in (
        ("bucketed", Bucketed(lengths, 32, **common)),
        ("shuffled", Shuffled(**common)),
    ):
        batches = lengths[order.ids(0, 640)].reshape(-1, 32)
        spread[name] = (batches.max(1) - batches.min(1)).mean()
    assert spread["bucketed"] < 0.2 * spread["shuffled"]


@given(st.integers(1, 3000), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_scattered_is_a_permutation(count, seed):
    assert sorted(scattered(np.arange(count), count, seed)) == list(range(count))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "`batch_size` must be a positive integer. Received: batch_size=0"),
        ((4, "wrap"), "`end` must be one of .*Received: end='wrap'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batches(*arguments)
