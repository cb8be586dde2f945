"""Checks that another kind of training resumes what one with or without local updates has saved."""

import numpy as np
import pytest

from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.local_updates import cases

IN_FLOAT64 = {"rtol": 1e-10, "atol": 1e-12}
LOCAL = ("LocalSGD", {"sync_every": 1})
WARMING_UP = ("LocalSGD", {"sync_every": 1, "warmup_steps": 1000})
# Rows of a batch that 1, 2 and 3 ranks divide equally.
EQUAL_PARTS = {"rows": 72, "batch": 12, "epochs": 1}
# An update takes the gradients of 4 steps. A training that fails after 3 has saved 2.
ACCUMULATING = {"optimizer": "sgd", "optimizer_options": {"gradient_accumulation_steps": 4}}
STOPPED_AFTER = 3


def _resumed(args: tuple, options: dict) -> dict:
    return cases.resumed(*args, **options)


def _trained(options: dict) -> dict:
    return cases.trained(None, **options)


def _after_a_step(local_updates: tuple, options: dict) -> list[np.ndarray]:
    return cases.recorded(local_updates, **options)["steps"][0]


def _changed(ranks, directory, before: tuple, after: tuple, options: dict, stop: int) -> list:
    """Returns all ranks' results of a training whose last steps are of another kind.

    Args:
        ranks: Pools of ranks.
        directory: Directory of the checkpoints.
        before: Number of ranks and `local_updates` of the first steps.
        after: The same of the others.
        options: Options of both.
        stop: Number of the first steps.
    """
    (size, method), (other_size, other_method) = before, after
    ranks(size).run(_resumed, (str(directory), method), {**options, "stop_after": stop})
    return ranks(other_size).run(_resumed, (str(directory), other_method), options)


SLOW = pytest.mark.slow
CHANGES = {
    "one_to_local": ((1, None), (2, LOCAL)),
    "local_to_synchronous": ((2, LOCAL), (2, None)),
    "local": ((2, LOCAL), (2, LOCAL)),
    "synchronous_to_local": ((2, None), (3, LOCAL)),
    "local_to_one": ((2, LOCAL), (1, LOCAL)),
    "local_to_other_synchronous": ((3, LOCAL), (2, None)),
    "more_local": ((2, LOCAL), (3, LOCAL)),
    "fewer_local": ((3, LOCAL), (2, LOCAL)),
    "warming_up_to_local": ((2, WARMING_UP), (3, LOCAL)),
    "local_to_warming_up": ((2, LOCAL), (2, WARMING_UP)),
    "warming_up_to_one": ((2, WARMING_UP), (1, None)),
}
BY_DEFAULT = list(CHANGES)[:3]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*change, id=name, marks=[] if name in BY_DEFAULT else SLOW)
        for name, change in CHANGES.items()
    ],
)
def test_accumulated_gradients(ranks, tmp_path, before, after):
    """With a synchronization after each step, all of it is synchronous training."""
    options = {**EQUAL_PARTS, **ACCUMULATING}
    (expected,) = ranks(1).run(_trained, options)
    results = _changed(ranks, tmp_path, before, after, options, STOPPED_AFTER)
    assert_same_bits(results)
    assert_close(expected["weights"], results[0]["weights"], **IN_FLOAT64)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW)])
def test_slots_become_their_means(ranks, tmp_path, size):
    options = {"optimizer": "adam", "epochs": 1}
    local = ("LocalSGD", {"sync_every": 3})
    before = ranks(2).run(_resumed, (str(tmp_path), local), options)
    after = ranks(size).run(_resumed, (str(tmp_path), None), options)
    assert_same_bits([before[0], *after])
    differs = [
        not np.array_equal(*both) for both in zip(*(b["slots"] for b in before), strict=True)
    ]
    assert any(differs)
    for result in after:
        for i, slot in enumerate(result["slots"]):
            mean = np.mean([b["slots"][i] for b in before], 0)
            np.testing.assert_allclose(slot, mean, rtol=1e-12, atol=1e-15)


@SLOW
def test_other_number_of_ranks_in_the_warmup_of_fragments(ranks, tmp_path):
    """No fragment has common weights of an earlier round yet."""
    method = {"sync_every": 4, "num_fragments": 2, "warmup_steps": 1000}
    options = {**EQUAL_PARTS, "optimizer": "sgd"}
    before, after = (2, ("DiLoCo", method)), (3, ("DiLoCo", method))
    (expected,) = ranks(1).run(_trained, options)
    results = _changed(ranks, tmp_path, before, after, options, 2)
    assert_same_bits(results)
    assert_close(expected["weights"], results[0]["weights"], **IN_FLOAT64)


@SLOW
def test_changed_learning_rate_is_the_programs(ranks, tmp_path):
    """With a rate of 0 after the first step, weights stay as they are."""
    local, directory = ("LocalSGD", {"sync_every": 1}), str(tmp_path)
    options = {**EQUAL_PARTS, "optimizer": "plain"}
    rate = {**options, "optimizer_options": {"learning_rate": 0.1}}
    no_rate = {**options, "optimizer_options": {"learning_rate": 0.0}, "on_change": "accept"}
    ranks(2).run(_resumed, (directory, local), {**rate, "stop_after": 2})
    results = ranks(2).run(_resumed, (directory, local), no_rate)
    expected = ranks(2).run(_after_a_step, local, rate)
    assert_close(expected[0], results[0]["weights"], **IN_FLOAT64)
