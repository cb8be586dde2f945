"""Checks one contract for every collective: single process, simulated ranks, real Horovod."""

import threading
import time
from collections.abc import Sequence
from unittest import mock

import numpy as np
import psutil
import pytest
import tensorflow as tf

from tests.harness import rank_job
from tfdml.collectives import horovod, tensorflow
from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.collectives.horovod import HorovodCollective
from tfdml.collectives.simulated import run_ranks
from tfdml.collectives.tensorflow import GroupMember
from tfdml.strategies.aggregation.device_aggregator import DeviceCollective

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64", "int8", "uint8"]


def contract(collective: Collective, summed: Sequence[str] = DTYPES) -> dict:
    """Calls every operation; returns this rank's results and the expected ones.

    Args:
        collective: The collective.
        summed: The dtypes that it sums.
    """
    rank, size = collective.rank, collective.size
    got, expected = {}, {}

    def check(name, actual, wanted):
        got[name], expected[name] = np.asarray(actual).tolist(), np.asarray(wanted).tolist()

    for dtype in summed:
        tensors = [tf.cast([rank, 1], dtype), tf.cast([[2 * rank]], dtype)]
        first, second = collective.all_reduce(tensors, f"sum/{dtype}")
        check(f"sum {dtype}", tf.cast(first, "float64"), [sum(range(size)), size])
        check(f"sum 2 {dtype}", tf.cast(second, "float64"), [[2 * sum(range(size))]])
        check(f"dtype {dtype}", first.dtype.name == dtype, True)
    for dtype in [*DTYPES, "bool", "uint16"]:
        value = tf.cast([rank, 1], dtype)
        last = size - 1
        check(
            f"broadcast {dtype}",
            collective.broadcast(value, f"from_last/{dtype}", root=last)
            == tf.cast([last, 1], dtype),
            [True, True],
        )
        parts = collective.all_gather(tf.fill([rank, 1], value[0]), f"gather/{dtype}")
        wanted = tf.cast([[r] for r in range(size) for _ in range(r)], dtype)
        check(f"gather {dtype}", tf.reduce_all(parts == wanted), True)
        check(f"rows {dtype}", len(parts), sum(range(size)))
        table = tf.cast(tf.reshape(tf.range(4 * size), [size, 4]) % 7 + rank, dtype)
        senders = tf.range(size)[:, None]
        mine = tf.cast(tf.stack([tf.range(4) + 4 * rank] * size) % 7 + senders, dtype)
        check(
            f"all_to_all {dtype}",
            collective.all_to_all(table, f"to/{dtype}") == mine,
            [[True] * 4] * size,
        )
        # Each rank has another number of rows, which all know.
        counts = list(range(1, size + 1))
        rows = tf.reshape(tf.range(2 * sum(counts)) % 7, [-1, 2])
        first = sum(counts[:rank])
        mine = rows[first : first + counts[rank]]
        received = collective.all_to_all_rows(
            tf.cast(rows + rank, dtype), counts, f"rows_to/{dtype}"
        )
        wanted = tf.cast(tf.stack([mine + sender for sender in range(size)]), dtype)
        check(f"all_to_all_rows {dtype}", tf.reduce_all(received == wanted), True)
        gathered = collective.all_gather_rows(tf.cast(mine, dtype), counts, f"rows_of/{dtype}")
        check(f"all_gather_rows {dtype}", tf.reduce_all(gathered == tf.cast(rows, dtype)), True)
        # Each rank sends another number of rows to each, which the others do not know.
        numbers = [[(sender + 2 * to) % 3 for to in range(size)] for sender in range(size)]
        sent = [_ragged_rows(rank, to, numbers[rank][to]) for to in range(size)]
        received, by_sender = collective.all_to_all_ragged(
            tf.cast(tf.concat(sent, 0), dtype), tf.constant(numbers[rank], tf.int32), f"to_{dtype}"
        )
        mine = [_ragged_rows(sender, rank, numbers[sender][rank]) for sender in range(size)]
        wanted = tf.cast(tf.concat(mine, 0), dtype)
        check(f"all_to_all_ragged {dtype}", tf.reduce_all(received == wanted), True)
        check(f"rows by sender {dtype}", by_sender, [row[rank] for row in numbers])
    check("scalar", collective.broadcast(tf.constant(rank), "scalar"), 0)
    return {"got": got, "expected": expected}


def _ragged_rows(sender: int, to: int, number: int) -> tf.Tensor:
    return (tf.reshape(tf.range(2 * number), [-1, 2]) + 3 * sender + to) % 7


def horovod_contract() -> dict:
    return contract(HorovodCollective())


def subgroup_contract(
    collective: Collective, groups: list[list[int]], summed: Sequence[str] = DTYPES
) -> dict:
    """Calls every operation of the subgroup that this rank is in, then of the whole job."""
    (own,) = (group for group in groups if collective.rank in group)
    result = contract(collective.subgroup(own), summed)
    whole = contract(collective, summed)
    assert whole["got"] == whole["expected"]
    return result


def horovod_subgroups(groups: list[list[int]]) -> dict:
    return subgroup_contract(HorovodCollective(), groups)


def tensorflow_subgroups(groups: list[list[int]]) -> dict:
    # TensorFlow does not sum bytes.
    summed = [dtype for dtype in DTYPES if not dtype.endswith("int8")]
    return subgroup_contract(rank_job.strategy().extended.collective, groups, summed)


def made_in_other_orders(in_any_order: bool) -> list[float]:
    """Makes two sums in a graph, in an order that is another on each rank."""
    collective = rank_job.strategy().extended.collective
    if in_any_order:
        collective = collective.in_any_order

    @tf.function
    def step(rank: tf.Tensor) -> dict[str, tf.Tensor]:
        # Not of constants: TensorFlow would sum these one after another when it makes the graph.
        sums = {}
        for name in ("first", "second")[:: 1 if collective.rank else -1]:
            (sums[name],) = collective.all_reduce([rank + len(name)], f"other_order_{name}")
        return sums

    found = step(tf.constant([collective.rank], tf.float32))
    return [float(found[name][0]) for name in ("first", "second")]


def horovod_in_a_graph() -> list:
    """Uses the same names repeatedly, in a loop inside a `tf.function`."""
    collective = HorovodCollective()

    @tf.function
    def loop(x):
        for _ in tf.range(5):
            (x,) = collective.all_reduce([x], "loop/sum")
            x = x / tf.cast(collective.size, x.dtype) + 1.0
        return x

    return [loop(tf.constant(float(collective.rank))).numpy().item() for _ in range(3)]


def large_broadcasts() -> list[bool]:
    """Broadcasts tensors of more bytes than are sent at once, from the last rank."""
    collective = HorovodCollective()
    root, same = collective.size - 1, []
    with (
        mock.patch.object(horovod, "BROADCAST_BYTES", 64),
        mock.patch.object(collective, "_broadcast", wraps=collective._broadcast) as sent,
    ):
        for dtype in ("int32", "float64", "bfloat16", "bool"):
            value = tf.cast(tf.reshape(tf.range(105) % 2 + collective.rank, [7, 15]), dtype)
            wanted = tf.cast(tf.reshape(tf.range(105) % 2 + root, [7, 15]), dtype)
            got = collective.broadcast(value, f"large/{dtype}", root)
            same.append(bool(tf.reduce_all(got == wanted)) and got.shape == wanted.shape)
        # Of 4, 8, 2 and 1 bytes each.
        same.append(sent.call_count == 7 + 14 + 4 + 2)
    return same


def large_sums() -> list[bool]:
    """Sums tensors of more bytes than a ring sums at once."""
    collective = rank_job.strategy().extended.collective
    same = []
    with (
        mock.patch.object(tensorflow, "RING_BYTES", 64),
        mock.patch.object(GroupMember, "_sum", autospec=True, side_effect=GroupMember._sum) as sent,
    ):
        for dtype in ("int32", "float64", "float16"):
            values = [tf.cast(tf.reshape(tf.range(105) % 2, [7, 15]), dtype), tf.ones([3], dtype)]
            own = [value * (collective.rank + 1) for value in values]
            sums = collective.all_reduce(own, f"large/{dtype}")
            pairs = [(s, 6 * v) for s, v in zip(sums, values, strict=True)]
            same.append(all(bool(tf.reduce_all(s == w)) and s.shape == w.shape for s, w in pairs))
        # Of 4, 8 and 2 bytes each.
        same.append(sent.call_count == 7 + 14 + 4)
    return same


def writes_while_nothing_is_exchanged() -> float:
    """Returns how often this process writes per second while it has nothing to send."""
    collective = HorovodCollective()
    collective.all_reduce([tf.ones([])], "before")
    # Subgroups have no connections of their own, which would poll, too.
    collective.subgroup([collective.rank]).all_gather(tf.ones([1]), "subgroup")
    process, seconds = psutil.Process(), 2.0
    before = process.io_counters().write_count
    time.sleep(seconds)
    written = (process.io_counters().write_count - before) / seconds
    collective.all_reduce([tf.ones([])], "after")
    return written


def _assert_contract(results: list[dict]) -> None:
    for rank, result in enumerate(results):
        assert result["got"] == result["expected"], f"rank {rank}"


def test_one_process():
    _assert_contract([contract(LocalCollective())])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_simulated(size):
    _assert_contract(run_ranks(size, contract))


@pytest.mark.parametrize("size", [2, 3])
def test_horovod(ranks, size):
    _assert_contract(ranks(size).run(horovod_contract))


GROUPS = [[[0, 2], [1]], [[0, 1], [2]], [[0], [1], [2]]]
# Real ranks by default in one division; simulated ones in all.
OF_REAL_RANKS = [GROUPS[0], *(pytest.param(g, marks=pytest.mark.slow) for g in GROUPS[1:])]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_subgroups_of_simulated_ranks(groups):
    _assert_contract(run_ranks(3, lambda c: subgroup_contract(c, groups)))


@pytest.mark.parametrize("groups", OF_REAL_RANKS, ids=str)
def test_subgroups_of_horovod(ranks, groups):
    _assert_contract(ranks(3).run(horovod_subgroups, groups))


@pytest.mark.parametrize("groups", OF_REAL_RANKS, ids=str)
def test_subgroups_of_tensorflow(ranks, groups):
    _assert_contract(ranks(3, "multi_worker").run(tensorflow_subgroups, groups))


@pytest.mark.parametrize("kind", ["multi_worker", "horovod"])
def test_operations_in_any_order_do_not_wait_for_each_other(ranks, kind):
    assert ranks(2, kind).run(made_in_other_orders, True, timeout=60) == [[11.0, 13.0]] * 2


def test_a_few_operations_of_a_ring_run_at_once(ranks):
    found = ranks(2, "multi_worker").run(made_in_other_orders, False, timeout=60)
    assert found == [[11.0, 13.0]] * 2


def test_large_tensors_are_summed_in_pieces(ranks):
    for same in ranks(3, "multi_worker").run(large_sums):
        assert same == [True] * 4


def test_a_collective_without_subgroups_says_so():
    assert LocalCollective().subgroup([0]).size == 1
    with pytest.raises(ValueError, match="must be all 2 ranks.*DeviceCollective cannot be divided"):
        DeviceCollective(["CPU:0", "CPU:1"], 0).subgroup([0])


def test_horovod_in_a_graph(ranks):
    for size in (2, 3):
        mean = (size - 1) / 2
        assert ranks(size).run(horovod_in_a_graph) == [[mean + 5.0] * 3] * size


def test_large_tensors_are_broadcast_in_parts(ranks):
    for same in ranks(2).run(large_broadcasts):
        assert same == [True] * 5


def test_idle_horovod_polls_rarely(ranks):
    # It polls 10 times a second instead of 1,000 times: about 26 writes, not 2,700.
    # (The amount grows with the number of names that it has seen.)
    assert max(ranks(2).run(writes_while_nothing_is_exchanged)) < 100


def test_simulated_ranks_with_different_calls_fail():
    def disagree(collective):
        collective.all_reduce([tf.zeros(2)], f"name_{collective.rank}")

    with pytest.raises(RuntimeError, match=r"names=\['name_0', 'name_1'\]"):
        run_ranks(2, disagree)


def test_a_simulated_rank_that_raises_ends_the_others():
    def fail(collective):
        if collective.rank == 1:
            raise KeyError("rank 1")
        collective.all_reduce([tf.zeros(2)], "sum")

    with pytest.raises(KeyError, match="rank 1"):
        run_ranks(3, fail)


def test_simulated_rank_times_out():
    def leave(collective):
        if collective.rank == 0:
            collective.all_reduce([tf.zeros(2)], "sum")

    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, leave, timeout=0.2)
