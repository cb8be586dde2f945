"""Checks that training with divided optimizer state gives the numbers of training without."""

from typing import Any

import numpy as np
import pytest

from tests.strategies.compare import assert_close
from tests.strategies.sharded import cases

BY_ROWS = (
    "sgd",
    "plain_sgd",
    "adam",
    "amsgrad",
    "adamw",
    "adagrad",
    "adadelta",
    "adamax",
    "nadam",
    "ftrl",
    "lion",
    "rmsprop",
    "centered",
    "row_wise_adagrad",
    "lazy_adam",
)
WHOLE = ("adafactor", "muon", "keras_lamb", "lars", "lamb", "unknown")
# Keras's Muon cannot train in float64: it multiplies by float32 numbers.
IN_FLOAT64 = tuple(name for name in (*BY_ROWS, *WHOLE, "scheduled") if name != "muon")
# By default one optimizer of each kind; the others are slow tests.
SHOWN = ("adam", "lamb", "unknown", "row_wise_adagrad")


def _slow_unless(names: tuple[str, ...], shown: tuple[str, ...] = SHOWN) -> list:
    return [pytest.param(n, marks=() if n in shown else pytest.mark.slow) for n in names]


def _without_bytes(result: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result.items() if k != "bytes"}


def _assert_same(expected: dict, results: list[dict]) -> None:
    """Asserts that all ranks have the same bits: of weights, whole slots and logs."""
    for result in results:
        for kind in ("weights", "slots"):
            pairs = zip(expected[kind], result[kind], strict=True)
            differing = [i for i, (a, b) in enumerate(pairs) if a.tobytes() != b.tobytes()]
            assert not differing, f"{kind} {differing} differ"
        np.testing.assert_equal(result["history"], expected["history"])


@pytest.mark.parametrize("name", _slow_unless((*BY_ROWS, *WHOLE, "scheduled")))
def test_same_bits_on_two_ranks(ranks, name):
    expected = ranks(2).run(cases.trained, name, False)[0]
    _assert_same(expected, ranks(2).run(cases.trained, name, True))


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _slow_unless(IN_FLOAT64, ("adam",)))
def test_numbers_without_sharding_in_float64(ranks, name, size):
    expected = ranks(size).run(cases.trained, name, False, None, "float64")[0]
    for result in ranks(size).run(cases.trained, name, True, None, "float64"):
        assert_close(_without_bytes(expected), _without_bytes(result), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_muon_on_three_ranks(ranks):
    expected = ranks(3).run(cases.trained, "muon", False)[0]
    for result in ranks(3).run(cases.trained, "muon", True):
        assert_close(_without_bytes(expected), _without_bytes(result), rtol=1e-3, atol=1e-4)


OPTIONS = {
    "clipvalue": {"clipvalue": 0.01},
    "weight_decay": {"weight_decay": 0.05},
    "ema": {"use_ema": True, "ema_momentum": 0.9},
    "ema_overwriting": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipnorm": {"clipnorm": 0.1},
}


@pytest.mark.parametrize("option", _slow_unless(tuple(OPTIONS), ("ema",)))
def test_options_of_optimizers_keep_the_bits(ranks, option):
    arguments = ("adam", False, OPTIONS[option])
    expected = ranks(2).run(cases.trained, *arguments)[0]
    _assert_same(expected, ranks(2).run(cases.trained, "adam", True, OPTIONS[option]))


@pytest.mark.parametrize("name", ["adam", pytest.param("lamb", marks=pytest.mark.slow)])
def test_global_clipnorm_is_that_of_all_parts(ranks, name):
    options = {"global_clipnorm": 0.05}
    expected = ranks(2).run(cases.trained, name, False, options, "float64")[0]
    for result in ranks(2).run(cases.trained, name, True, options, "float64"):
        assert_close(_without_bytes(expected), _without_bytes(result), rtol=1e-10, atol=1e-12)
    plain = ranks(2).run(cases.trained, name, True, None, "float64")[0]
    assert not np.allclose(plain["slots"][2], result["slots"][2], rtol=0.1), "It clips nothing."


@pytest.mark.slow
@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_ways_to_train_keep_the_bits(ranks, name, way):
    expected = ranks(2).run(_trained_by, way, name, False)[0]
    _assert_same(expected, ranks(2).run(_trained_by, way, name, True))


def _trained_by(way: str, name: str, sharded: bool) -> dict:
    return cases.trained(name, sharded, **cases.WAYS[way])


def test_two_optimizers_of_a_model_keep_the_bits(ranks):
    expected = ranks(2).run(cases.trained_by_two, False)[0]
    _assert_same(expected, ranks(2).run(cases.trained_by_two, True))


@pytest.mark.slow
def test_two_optimizers_of_a_model_on_three_ranks(ranks):
    expected = ranks(3).run(cases.trained_by_two, False, "float64")[0]
    for result in ranks(3).run(cases.trained_by_two, True, "float64"):
        assert_close(_without_bytes(expected), _without_bytes(result), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["adam", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lamb", "unknown"))]
)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_slots_are_divided(ranks, name, size):
    unsharded = ranks(size).run(cases.trained, name, False)[0]
    whole = unsharded["bytes"]
    parts = [result["bytes"] for result in ranks(size).run(cases.trained, name, True)]
    # What all ranks keep: the slots of small variables, and a few scalars.
    common = 30_000 if name == "lamb" else 700
    # An unknown optimizer's variables are not cut, and its slots are as large as they.
    largest = max(w.nbytes for w in unsharded["weights"]) if name == "unknown" else 0
    assert max(parts) < max(whole / size * 1.1, largest) + common
    assert whole <= sum(parts) <= whole + common * size


@pytest.mark.parametrize("name", ["adam", pytest.param("unknown", marks=pytest.mark.slow)])
def test_same_bits_between_workers(ranks, name):
    expected = ranks(2, "multi_worker").run(cases.trained, name, False)[0]
    _assert_same(expected, ranks(2, "multi_worker").run(cases.trained, name, True))
