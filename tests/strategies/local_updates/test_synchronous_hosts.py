"""Checks local updates of hosts: a host's ranks take each step together."""

import numpy as np
import pytest
import tensorflow as tf

import tfdml
from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.local_updates import cases
from tests.strategies.local_updates.waiting import Waiting
from tfdml.local_updates import DiLoCo, LocalSGD

IN_FLOAT64 = {"rtol": 1e-10, "atol": 1e-12}
SLOW = pytest.mark.slow
TOGETHER = {"synchronous_hosts": True}
LOCAL = ("LocalSGD", {"sync_every": 3, **TOGETHER})
OF_RANKS = ("LocalSGD", {"sync_every": 3})
DILOCO = ("DiLoCo", {"sync_every": 3, "outer_optimizer": "nesterov", **TOGETHER})


def _case(args: tuple, options: dict) -> dict:
    return cases.trained(*args, **options)


def _recorded(local_updates: tuple, options: dict) -> dict:
    return cases.recorded(local_updates, optimizer="adam", **options)


def _trained(job, *args, **options) -> dict:
    """Returns rank 0's result of a training, after checking that all ranks have its weights."""
    results = job.run(_case, args, options)
    assert_same_bits(results)
    for result in results[1:]:
        np.testing.assert_equal(result["history"], results[0]["history"])
    return results[0]


@pytest.fixture
def hosts(ranks):
    """Two hosts of two ranks."""
    return ranks(4, "multi_worker", 2)


def test_equal_to_a_process_that_plays_all_hosts(hosts):
    """Also of a batch with one row: then a host has none, and a rank of the other."""
    expected = cases.played_in_turn(2, "adam", "nesterov", 3)
    result = _trained(hosts, DILOCO, "adam")
    assert_close(expected, result["weights"], **IN_FLOAT64)


@SLOW
def test_hosts_may_have_different_numbers_of_ranks(ranks):
    expected = cases.played_in_turn(2, "adam", "nesterov", 3, [(3, 1)] * cases.EPOCHS)
    result = _trained(ranks(3, "multi_worker", 2), DILOCO, "adam")
    assert_close(expected, result["weights"], **IN_FLOAT64)


WAYS = {
    "statistics": {"statistics": True, "synchronized": True, "validates": True},
    "accumulation": {"optimizer_options": {"gradient_accumulation_steps": 2}, "rows": 48},
    "averages": {"optimizer_options": {"use_ema": True, "ema_momentum": 0.8}},
    "steps_per_execution": {"compile_options": {"steps_per_execution": 3}},
    "jit": {"compile_options": {"jit_compile": True}},
    "eager": {"compile_options": {"run_eagerly": True}},
    "devices": {"devices": 2},
    "batch_split": {"strategy_options": {"batch_split": [1, 3, 2, 2]}},
    "check_desync": {"strategy_options": {"check_desync": 1}},
}


@pytest.mark.parametrize(
    "way", ["statistics", *(pytest.param(way, marks=SLOW) for way in list(WAYS)[1:])]
)
def test_equal_to_two_ranks(ranks, hosts, way):
    options = WAYS[way]
    alone = {name: value for name, value in options.items() if name != "devices"}
    if way == "batch_split":
        # Of the batch with one row, the first rank of each job has it.
        alone = {"strategy_options": {"batch_split": [1, 1]}}
    # The second host has rows in the first steps of a round, and none in its last step.
    every = {"sync_every": 4}
    expected = _trained(ranks(2), ("LocalSGD", every), "momentum", **alone)
    result = _trained(hosts, ("LocalSGD", {**every, **TOGETHER}), "momentum", **options)
    assert_close(expected["weights"], result["weights"], **IN_FLOAT64)
    assert_close(expected["history"], result["history"], rtol=1e-6, atol=1e-7)
    assert result["rows_seen"].tolist() == expected["rows_seen"].tolist()


METHODS = {
    "warmup": ("LocalSGD", {"sync_every": 2, "warmup_steps": 5}),
    "fragments": ("DiLoCo", {"sync_every": 4, "num_fragments": 2, "average_slots": True}),
}


@SLOW
@pytest.mark.parametrize("name", list(METHODS))
def test_methods_are_equal_to_two_ranks(ranks, hosts, name):
    kind, arguments = METHODS[name]
    expected = _trained(ranks(2), METHODS[name], "momentum")
    result = _trained(hosts, (kind, {**arguments, **TOGETHER}), "momentum")
    assert_close(expected["weights"], result["weights"], **IN_FLOAT64)
    assert_close(expected["history"], result["history"], rtol=1e-6, atol=1e-7)


@SLOW
def test_codec_compresses_between_hosts(ranks, hosts):
    """Nothing is encoded within a host."""
    options = {"dtype": "float32", "strategy_options": {"compression": "float16"}}
    expected = _trained(ranks(2), OF_RANKS, "sgd", **options)
    result = _trained(hosts, LOCAL, "sgd", **options)
    assert_close(expected["weights"], result["weights"], rtol=1e-3, atol=2e-5)
    plain = _trained(hosts, LOCAL, "sgd", dtype="float32")
    assert not np.array_equal(plain["weights"][0], result["weights"][0])


@SLOW
def test_each_rank_reads_its_own_part(ranks, hosts):
    local = ("LocalSGD", {"sync_every": 1, **TOGETHER})
    expected = _trained(ranks(4), None, "sgd", own_data=True)
    result = _trained(hosts, local, "sgd", own_data=True)
    assert_close(expected["weights"], result["weights"], **IN_FLOAT64)


@SLOW
def test_one_host_trains_synchronously(ranks):
    expected = _trained(ranks(2), None, "adam")
    result = _trained(ranks(2, "multi_worker"), LOCAL, "adam")
    assert_close(expected["weights"], result["weights"], **IN_FLOAT64)


def test_ranks_of_a_host_are_the_same_after_each_step(hosts):
    results = hosts.run(_recorded, LOCAL, {"epochs": 1})
    first, second, third, fourth = (result["losses"] for result in results)
    assert first == second != third == fourth
    steps = [result["steps"] for result in results]
    for number in range(cases.STEPS):
        first, second, third, fourth = (own[number][0].tobytes() for own in steps)
        assert first == second
        assert third == fourth
        assert (first == third) == (number + 1 in (3, 6)), number


def test_between_synchronizations_hosts_do_not_wait(hosts, tmp_path):
    """A rank of the second host waits after its first step until rank 0 has taken its third."""
    hosts.run(_one_waits, ("LocalSGD", {"sync_every": 4, **TOGETHER}), str(tmp_path))


def _one_waits(local_updates: tuple, directory: str) -> None:
    waiting = Waiting(3, directory, waiting_rank=2)
    cases.trained(local_updates, epochs=1, rows=32, callbacks=[waiting])
    assert waiting.has_waited or waiting.rank != 2


def _resumed(args: tuple, options: dict) -> dict:
    return cases.resumed(*args, **options)


@SLOW
def test_resumed_training_has_the_same_bits(hosts, tmp_path):
    options = {"optimizer": "adam"}
    whole = hosts.run(_resumed, (str(tmp_path / "whole"), LOCAL), options)
    args = (str(tmp_path / "broken"), LOCAL)
    hosts.run(_resumed, args, {**options, "stop_after": cases.STEPS + 5})
    results = hosts.run(_resumed, args, options)
    for expected, result in zip(whole, results, strict=True):
        for key in ("weights", "slots"):
            pairs = zip(expected[key], result[key], strict=True)
            assert all(a.tobytes() == b.tobytes() for a, b in pairs), key


@SLOW
@pytest.mark.parametrize("together_first", [True, False])
def test_accumulated_gradients_of_other_groups(ranks, hosts, tmp_path, together_first):
    """Hosts go on with what ranks have added up, and the other way round."""
    options = {"rows": 72, "batch": 12, "epochs": 1, "optimizer": "sgd"}
    options["optimizer_options"] = {"gradient_accumulation_steps": 4}
    (expected,) = ranks(1).run(_case, (None,), options)
    of_ranks = ("LocalSGD", {"sync_every": 1})
    of_hosts = ("LocalSGD", {"sync_every": 1, **TOGETHER})
    before, after = (of_hosts, of_ranks) if together_first else (of_ranks, of_hosts)
    hosts.run(_resumed, (str(tmp_path), before), {**options, "stop_after": 3})
    results = hosts.run(_resumed, (str(tmp_path), after), options)
    assert_same_bits(results)
    assert_close(expected["weights"], results[0]["weights"], **IN_FLOAT64)


@SLOW
def test_other_groups_begin_with_the_means_of_slots(hosts, tmp_path):
    """Ranks of a host must have the same slots."""
    options = {"optimizer": "adam", "epochs": 1}
    before = hosts.run(_resumed, (str(tmp_path), OF_RANKS), options)
    results = hosts.run(_resumed, (str(tmp_path), LOCAL), options)
    for result in results:
        for i, slot in enumerate(result["slots"]):
            mean = np.mean([b["slots"][i] for b in before], 0)
            np.testing.assert_allclose(slot, mean, rtol=1e-12, atol=1e-15)


def test_local_steps_sum_over_own_devices_only(ranks):
    """Also where a ring over the devices of all processes sums the gradients of other steps."""
    expected = cases.played_in_turn(2, "adam", "plain", 3)
    results = ranks(2, "multi_worker").run(_of_a_ring)
    assert_same_bits(results)
    assert_close(expected, results[0]["weights"], **IN_FLOAT64)


def _of_a_ring() -> dict:
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return cases.trained(
        OF_RANKS, "adam", devices=2, strategy_options={"communication_options": options}
    )


def test_horovod_is_refused():
    with pytest.raises(ValueError, match="must not have `synchronous_hosts`") as error:
        tfdml.HorovodStrategy(local_updates=LocalSGD(4, synchronous_hosts=True))
    assert "Start one process on each host" in str(error.value)


def test_measured_parts_are_refused():
    with pytest.raises(ValueError, match="`batch_split` must not be 'auto'"):
        tfdml.MultiWorkerMirroredStrategy(
            local_updates=DiLoCo(4, synchronous_hosts=True), batch_split="auto"
        )
