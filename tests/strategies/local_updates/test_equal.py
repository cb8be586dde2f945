"""Checks training with local updates against synchronous training, and a process that plays all."""

import numpy as np
import pytest

from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.local_updates import cases

IN_FLOAT64 = {"rtol": 1e-10, "atol": 1e-12}


def _trained(ranks, size, *args, kind="horovod", **options) -> dict:
    """Returns rank 0's result of a training, after checking that all ranks have its weights."""
    results = ranks(size, kind).run(_case, args, options)
    assert_same_bits(results)
    for result in results[1:]:
        np.testing.assert_equal(result["history"], results[0]["history"])
    return results[0]


def _case(args: tuple, options: dict) -> dict:
    return cases.trained(*args, **options)


def _assert_equal(one: dict, other: dict, *keys: str, **tolerance: float) -> None:
    for key in keys or ("weights",):
        assert_close(one[key], other[key], where=key, **(tolerance or IN_FLOAT64))


LOCAL_1 = ("LocalSGD", {"sync_every": 1})
AVERAGING = ("LocalSGD", {"sync_every": 1, "average_slots": True})
AS_NESTEROV = ("DiLoCo", {"sync_every": 1, "outer_optimizer": "nesterov"})


@pytest.mark.parametrize(
    ("local_updates", "optimizer", "reference"),
    [
        (LOCAL_1, "sgd", "sgd"),
        (AVERAGING, "momentum", "momentum"),
        pytest.param(AVERAGING, "nesterov", "nesterov", marks=pytest.mark.slow),
        (AS_NESTEROV, "sgd", "nesterov"),
    ],
    ids=["sgd", "momentum", "nesterov", "outer_nesterov"],
)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_synchronizing_at_every_step_is_synchronous_training(
    ranks, size, local_updates, optimizer, reference
):
    expected = _trained(ranks, size, None, reference)
    result = _trained(ranks, size, local_updates, optimizer)
    _assert_equal(expected, result)
    # Metrics are of different weights: each rank's batch is measured by its own, which are common.
    assert_close(expected["history"], result["history"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("optimizer", "outer", "every"),
    [
        pytest.param("sgd", "plain", 3, marks=pytest.mark.slow),
        ("adam", "plain", 4),
        ("momentum", "nesterov", 2),
        pytest.param("lamb", "half", 3, marks=pytest.mark.slow),
        pytest.param("adam", "adam", 5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equal_to_a_process_that_plays_all_ranks(ranks, size, optimizer, outer, every):
    expected = cases.played_in_turn(size, optimizer, outer, every)
    diloco = ("DiLoCo", {"sync_every": every, "outer_optimizer": outer})
    result = _trained(ranks, size, diloco, optimizer)
    assert_close(expected, result["weights"], **IN_FLOAT64)
    if outer == "plain":
        local = ("LocalSGD", {"sync_every": every})
        _assert_equal(result, _trained(ranks, size, local, optimizer), "weights", "history")


def test_multi_worker_strategy_is_equal_too(ranks):
    expected = cases.played_in_turn(2, "adam", "nesterov", 3)
    diloco = ("DiLoCo", {"sync_every": 3, "outer_optimizer": "nesterov"})
    result = _trained(ranks, 2, diloco, "adam", kind="multi_worker")
    assert_close(expected, result["weights"], **IN_FLOAT64)


def test_given_parts_of_batches(ranks):
    expected = cases.played_in_turn(2, "sgd", "plain", 3, [(3, 1)] * cases.EPOCHS)
    options = {"strategy_options": {"batch_split": [3, 1]}}
    result = _trained(ranks, 2, ("LocalSGD", {"sync_every": 3}), "sgd", **options)
    assert_close(expected, result["weights"], **IN_FLOAT64)


def test_measured_parts_of_batches(ranks):
    """Parts change after each epoch, by the rows and seconds of its rounds."""
    local = ("LocalSGD", {"sync_every": 2})
    one, other = ranks(2).run(cases.with_measured_parts, local)
    assert_same_bits([one, other])
    assert one["parts"] == other["parts"] == [(1, 1), (3, 1), (1, 3)]
    expected = cases.played_in_turn(2, "adam", "plain", 2, one["parts"])
    assert_close(expected, one["weights"], **IN_FLOAT64)


@pytest.mark.parametrize(
    ("optimizer", "outer", "every"),
    [("adam", "nesterov", 4), pytest.param("momentum", "half", 3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("average_slots", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fragments_are_equal_to_a_process_that_plays_all_ranks(
    ranks, optimizer, outer, every, average_slots
):
    """All slots are averaged when the first of two fragments is synchronized."""
    options = {"average_slots": average_slots}
    expected = cases.played_in_turn(2, optimizer, outer, every, fragments=2, **options)
    options |= {"sync_every": every, "outer_optimizer": outer, "num_fragments": 2}
    result = _trained(ranks, 2, ("DiLoCo", options), optimizer)
    assert_close(expected, result["weights"], **IN_FLOAT64)


@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_averages_of_weights(ranks, fragments):
    """Each synchronization averages the ranks' averages, by the rows since the last of any."""
    averaging = {"use_ema": True, "ema_momentum": 0.8}
    expected = cases.played_in_turn(
        2, "adam", "half", 4, fragments=fragments, optimizer_options=averaging
    )
    options = {"sync_every": 4, "outer_optimizer": "half", "num_fragments": fragments}
    result = _trained(ranks, 2, ("DiLoCo", options), "adam", optimizer_options=averaging)
    assert_close(expected, result["weights"], **IN_FLOAT64)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("lamb", marks=pytest.mark.slow)])
def test_equal_rows_on_all_ranks_are_one_process(ranks, optimizer):
    """Each of two ranks has the rows of one process, 4 of each batch."""
    (expected,) = ranks(1).run(_case, (None, optimizer), {"rows": 24, "batch": 4})
    local = ("LocalSGD", {"sync_every": 3})
    result = _trained(ranks, 2, local, optimizer, rows=24, same_rows=True)
    _assert_equal(expected, result)


def test_a_long_round_is_a_job_of_its_own_until_the_epoch_ends(ranks):
    results = ranks(2).run(_recorded, ("LocalSGD", {"sync_every": 1000}), {"rows": 48, "epochs": 1})
    for rank, result in enumerate(results):
        alone = cases.part_alone(2, rank, "adam")
        last = result["steps"][-1]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, last, strict=True))
    assert_same_bits(results)
    differ = [a != b for a, b in zip(results[0]["steps"][-1], results[1]["steps"][-1], strict=True)]
    assert any(d.any() for d in differ), "The ranks had the same weights before."


def _recorded(local_updates: tuple, options: dict) -> dict:
    return cases.recorded(local_updates, optimizer="adam", **options)


@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_synchronized_weights_are_the_same_bits(ranks, fragments):
    """A fragment's weights, of 6, are common after its synchronization; all at an epoch's end."""
    diloco = ("DiLoCo", {"sync_every": 3, "num_fragments": fragments})
    one, other = ranks(2).run(_recorded, diloco, {})
    # For each weight, the steps after which it is common, from 1.
    common = [
        [
            number % cases.STEPS + 1
            for number, (a, b) in enumerate(zip(one["steps"], other["steps"], strict=True))
            if a[i].tobytes() == b[i].tobytes()
        ]
        for i in range(6)
    ]
    if fragments == 1:
        assert common == [[3, 6] * 2] * 6
    else:
        assert common == [[3, 6] * 2, [2, 5] * 2, [1, 4, 7] * 2] * 2
    assert_same_bits([one, other])


WAYS = {
    "devices": {"devices": 2},
    "steps_per_execution": {"compile_options": {"steps_per_execution": 3}},
    "eager": {"compile_options": {"run_eagerly": True}},
    "jit": {"compile_options": {"jit_compile": True}},
    "check_desync": {"strategy_options": {"check_desync": 1}},
}


@pytest.mark.parametrize(
    "way", ["devices", *(pytest.param(w, marks=pytest.mark.slow) for w in list(WAYS)[1:])]
)
def test_ways_to_train(ranks, way):
    local = ("LocalSGD", {"sync_every": 3})
    expected = _trained(ranks, 2, local, "momentum")
    result = _trained(ranks, 2, local, "momentum", **WAYS[way])
    _assert_equal(expected, result)
    assert_close(expected["history"], result["history"], rtol=1e-6, atol=1e-7)


def test_accumulated_gradients(ranks):
    """Rounds end between updates, too: only whole ones have changed weights."""
    local = ("LocalSGD", {"sync_every": 1})
    options = {"optimizer_options": {"gradient_accumulation_steps": 2}}
    expected = _trained(ranks, 2, None, "sgd", rows=48, **options)
    _assert_equal(expected, _trained(ranks, 2, local, "sgd", rows=48, **options))


def test_warmup_ends_with_an_update(ranks):
    """With gradients of 2 steps for each update, 3 synchronous steps are 4."""
    local = ("LocalSGD", {"sync_every": 1, "warmup_steps": 3})
    options = {"optimizer_options": {"gradient_accumulation_steps": 2}}
    expected = _trained(ranks, 2, None, "sgd", rows=48, **options)
    _assert_equal(expected, _trained(ranks, 2, local, "sgd", rows=48, **options))


def test_warmup_is_synchronous_training(ranks):
    always = _trained(ranks, 2, None, "adam")
    for_good = ("LocalSGD", {"sync_every": 3, "warmup_steps": 1000})
    _assert_equal(always, _trained(ranks, 2, for_good, "adam"), "weights", "history")
    for_an_epoch = ("LocalSGD", {"sync_every": 3, "warmup_steps": cases.STEPS})
    first = _trained(ranks, 2, for_an_epoch, "adam")
    np.testing.assert_allclose(first["history"]["loss"][0], always["history"]["loss"][0])
    assert not np.allclose(first["weights"][0], always["weights"][0], rtol=1e-6)


@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_metrics_and_validation_are_of_the_whole_job(ranks, fragments):
    """With a learning rate of 0, all weights stay, and all metrics are those of one process."""
    options = {"optimizer_options": {"learning_rate": 0.0}, "validates": True}
    options["optimizer"] = "plain"
    (expected,) = ranks(1).run(_case, (None,), options)
    method = ("DiLoCo", {"sync_every": 3, "num_fragments": fragments})
    result = _trained(ranks, 3, method, **options)
    assert_close(expected["history"], result["history"], rtol=1e-6, atol=1e-7)
    assert result["rows_seen"].tolist() == [cases.ROWS] * cases.EPOCHS


@pytest.mark.slow
def test_moving_statistics_are_means_by_rows(ranks):
    """As in synchronous training, except that a rank's statistics follow its own rows."""
    options = {"statistics": True, "optimizer_options": {"learning_rate": 0.0}}
    options["optimizer"] = "plain"
    expected = _trained(ranks, 2, None, rows=48, **options)
    result = _trained(ranks, 2, ("LocalSGD", {"sync_every": 4}), rows=48, **options)
    _assert_equal(expected, result)


def test_a_rank_without_rows_keeps_its_statistics(ranks):
    """One of two ranks has no row of the last batch."""
    options = {"statistics": True, "optimizer_options": {"learning_rate": 0.0}, "epochs": 1}
    local = ("LocalSGD", {"sync_every": 100})
    result = _trained(ranks, 2, local, optimizer="plain", **options)
    # Scale and offset, then the moving statistics, come after the first layer's two weights.
    assert_close(cases.statistics_alone(2), result["weights"][4:6], **IN_FLOAT64)


def test_each_rank_reads_its_own_part(ranks):
    local = ("LocalSGD", {"sync_every": 1})
    expected = _trained(ranks, 2, None, "sgd", own_data=True)
    _assert_equal(expected, _trained(ranks, 2, local, "sgd", own_data=True))


@pytest.mark.slow
def test_mixed_precision(ranks):
    local = ("LocalSGD", {"sync_every": 3})
    for policy in ("mixed_bfloat16", "mixed_float16"):
        result = _trained(ranks, 2, local, "sgd", dtype=policy)
        expected = _trained(ranks, 2, local, "sgd", dtype="float32")
        assert_close(expected["weights"], result["weights"], rtol=0.1, atol=0.02)


SLOW = ("powersgd", "topk", "onebit", "auto")
CODECS = ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_give_all_ranks_the_same_bits(ranks, codec):
    local = ("LocalSGD", {"sync_every": 3})
    options = {"dtype": "float32", "strategy_options": {"compression": codec}}
    result = _trained(ranks, 3, local, "sgd", **options)
    plain = _trained(ranks, 3, local, "sgd", dtype="float32")
    assert result["history"]["loss"][-1] < result["history"]["loss"][0]
    if codec != "auto":
        both = zip(result["weights"], plain["weights"], strict=True)
        differs = [not np.array_equal(*pair) for pair in both]
        assert any(differs), "Nothing was compressed."


def test_second_fit_goes_on_with_each_ranks_own_slots(ranks):
    local = ("LocalSGD", {"sync_every": 3})
    once = ranks(2).run(_case, (local, "adam"), {})
    twice = ranks(2).run(_case, (local, "adam"), {"epochs": 1, "fits": 2})
    for expected, result in zip(once, twice, strict=True):
        pairs = zip(expected["slots"], result["slots"], strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def test_lookahead_on_one_process(ranks):
    diloco = ("DiLoCo", {"sync_every": 3, "outer_optimizer": "half"})
    (result,) = ranks(1).run(_case, (diloco, "adam"), {})
    assert_close(cases.played_in_turn(1, "adam", "half", 3), result["weights"], **IN_FLOAT64)


def test_local_sgd_on_one_process_is_plain_training(ranks):
    (plain,) = ranks(1).run(_case, (None, "adam"), {})
    (local,) = ranks(1).run(_case, (("LocalSGD", {"sync_every": 3}), "adam"), {})
    assert_same_bits([plain, local])
