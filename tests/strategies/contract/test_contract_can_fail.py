"""Checks that the contract fails without a part of the seam, so the tests are sensitive."""

import random
from collections.abc import Callable
from unittest import mock

import pytest
import tensorflow as tf

from tests.strategies import cases
from tests.strategies.compare import assert_invariant
from tests.strategies.contract import custom_cases, training_cases
from tfdml.collectives import aggregator
from tfdml.strategies.input import local_batch
from tfdml.strategies.keras_seam.data import array_data
from tfdml.strategies.keras_seam.fit import trainer
from tfdml.strategies.replicas import extended


def _without_exchange():
    return mock.patch.object(aggregator, "sum_in_buckets", lambda c, gradients, *_, **__: gradients)


def _without_weighting():
    equal = lambda self, dtype: tf.cast(1 / 2, dtype)  # noqa: E731
    return mock.patch.object(local_batch.ShareInfo, "fraction", equal)


def _without_shuffle_agreement():
    own = lambda collective: random.getrandbits(62)  # noqa: E731
    assert trainer.agreed_seed is array_data.agreed_seed
    return mock.patch.object(trainer, "agreed_seed", own)


def _without_initial_broadcast():
    return mock.patch.object(
        extended.ReplicaExtended,
        "_get_variable_creator_initial_value",
        extended.BatchExtended._get_variable_creator_initial_value,
    )


def broken(part: str, case: Callable, *args):
    """Runs `case` with one part of the seam removed."""
    with globals()[f"_without_{part}"]():
        return case(*args)


@pytest.mark.parametrize(
    ("part", "case"),
    [
        ("exchange", (cases.fit_arrays, 33, 16)),
        ("weighting", (cases.fit_arrays, 35, 16)),
        pytest.param("shuffle_agreement", (cases.fit_arrays, 33, 16), marks=pytest.mark.slow),
        pytest.param("initial_broadcast", (custom_cases.custom_loop,), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contract_detects_a_missing_part(ranks, part, case):
    whole = ranks.run_sizes((1, 2), *case)
    assert_invariant(whole)
    with pytest.raises(AssertionError, match=r"size 2|differs between ranks"):
        assert_invariant(whole | {2: ranks(2).run(broken, part, *case)})


def test_exactly_once_fails_without_the_shuffle_agreement(ranks):
    case = training_cases.samples_by_epoch
    parts = ranks(2).run(broken, "shuffle_agreement", case, True)
    assert sorted(sum((p[0] for p in parts), [])) != list(range(96))
