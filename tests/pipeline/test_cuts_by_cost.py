"""Cuts by cost: as good as the best of all cuts, and within memory limits."""

import itertools
import random

import numpy as np
import pytest

from tfdml.pipeline.cuts import cut_by_cost, stages_of


def _seconds(costs, cuts, transfer):
    ends = [*cuts[1:], len(costs)]
    return [
        sum(costs[b:e]) + (transfer[b] if b else 0) + (transfer[e] if e < len(costs) else 0)
        for b, e in zip(cuts, ends, strict=True)
    ]


def _all_cuts(count, num_stages):
    for later in itertools.combinations(range(1, count), num_stages - 1):
        yield [0, *later]


def _fits(cuts, memory, limits):
    ends = [*cuts[1:], len(memory)]
    used = [sum(memory[b:e]) for b, e in zip(cuts, ends, strict=True)]
    return all(u <= limit for u, limit in zip(used, limits, strict=True))


def _merit(costs, cuts, transfer):
    """Returns the key that the best cut minimises, with ties: integers make it exact."""
    seconds = _seconds(costs, cuts, transfer)
    return max(seconds), sum(s * s for s in seconds), cuts[::-1]


def _case(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    num_stages = draw.randint(1, min(count, 4))
    # Few different numbers: ties are frequent.
    costs = [draw.choice([0, 1, 1, 2, 7]) for _ in range(count)]
    transfer = [draw.choice([0, 0, 3]) for _ in range(count)]
    memory = [draw.choice([0, 1, 2, 5]) for _ in range(count)]
    limits = [draw.choice([3, 6, 9]) for _ in range(num_stages)]
    return costs, num_stages, transfer, memory, limits


@pytest.mark.parametrize("with_transfer", [False, True])
def test_the_cut_is_the_best_of_all(with_transfer):
    for seed in range(200):
        costs, num_stages, transfer, _, _ = _case(seed)
        transfer = transfer if with_transfer else [0] * len(costs)
        best = min(_all_cuts(len(costs), num_stages), key=lambda c: _merit(costs, c, transfer))
        found = cut_by_cost(costs, num_stages, transfer=transfer if with_transfer else None)
        assert found == best, seed


def test_the_cut_is_the_best_of_those_within_the_limits():
    refused = 0
    for seed in range(200):
        costs, num_stages, transfer, memory, limits = _case(seed)
        allowed = [c for c in _all_cuts(len(costs), num_stages) if _fits(c, memory, limits)]
        if allowed:
            best = min(allowed, key=lambda c: _merit(costs, c, transfer))
            assert cut_by_cost(costs, num_stages, memory, limits, transfer) == best, seed
        else:
            refused += 1
            with pytest.raises(ValueError, match="memory limit"):
                cut_by_cost(costs, num_stages, memory, limits, transfer)
    assert 50 < refused < 150


def test_memory_may_depend_on_the_stage():
    # The first stage keeps the activations of two microbatches, the last of one.
    def memory(stage, begin, end):
        return (2 - stage) * (end - begin)

    assert cut_by_cost([1] * 6, 2, memory, [6, 6]) == [0, 3]
    assert cut_by_cost([1] * 6, 2, memory, [4, 6]) == [0, 2]
    with pytest.raises(ValueError, match="hold at most the calls before 'f'"):
        cut_by_cost([1] * 6, 2, memory, [4, 3], names="abcdef")


def test_equal_costs_in_floating_point_are_cut_evenly():
    assert cut_by_cost([0.1] * 12, 4) == [0, 3, 6, 9]
    assert cut_by_cost([1 / 3] * 10, 4) == cut_by_cost([1.0] * 10, 4)


def test_large_models_are_cut_in_time():
    costs = np.random.default_rng(0).uniform(size=1000)
    cuts = cut_by_cost(costs, 8)
    slowest = max(_seconds(list(costs), cuts, [0] * 1000))
    assert slowest < 1.02 * costs.sum() / 8


def test_stages_of_cuts():
    assert stages_of([0, 2, 3], 5) == [0, 0, 1, 2, 2]
    assert stages_of([0], 2) == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 1], 3), "num_stages=3 and a model with 2 calls. Use at most 2 devices"),
        (([1, 1], 0), "`num_stages` must be a positive number"),
        (([1, 1], 2, [1, 1]), "`memory` and `limits` go together"),
        (([1, 1], 2, [1], [1, 1]), "`memory` must have 2 numbers, one for each call"),
        (([1, 1], 2, [1, 1], [1]), "`limits` must have 2 numbers, one for each stage"),
        (([1, 1], 2, None, None, [1]), "`transfer` must have 2 numbers"),
        (
            ([1, 1], 2, [1, 9], [4, 3], None, ["a", "b"]),
            "'b' alone takes at least 9 B.*limit is 4 B",
        ),
        (([1, 1], 2, [1, 5], [9, 3], None, ["a", "b"]), "Stage 1 of 2.*begin with 'b' or an"),
        (
            ([1] * 4, 2, [1] * 4, [2, 1], None, "abcd"),
            "before 'd', which would take 1 B of stage 1",
        ),
        (([1, 1], 2, [5, 1], [3, 9], None, ["a", "b"]), "Stage 0 of 2.*begin with 'a' or an"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cut_by_cost(*arguments)
