"""Checks that weights and slots trained on several replicas equal those of one replica."""

import pytest

from tests.optimizers import cases
from tests.strategies.compare import assert_invariant, assert_same_bits

KINDS = pytest.mark.parametrize(
    "kind", ["horovod", "mirrored", pytest.param("multi_worker", marks=pytest.mark.slow)]
)
IDS = {"ids": lambda value: value if isinstance(value, str) else "+".join(value)}


def _compare(ranks, kind, name, options):
    results = ranks.run_sizes((1, 2), cases.train, name, options, kind=kind)
    assert_invariant(results, rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LAMB", {"global_clipnorm": 0.5, "exclude_from_layer_adaptation": []}),
        ("LARS", {"nesterov": True, "use_ema": True, "ema_momentum": 0.5}),
    ],
    **IDS,
)
def test_two_replicas_equal_one(ranks, kind, name, options):
    _compare(ranks, kind, name, options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LAMB", {"gradient_accumulation_steps": 2}),
        ("LARS", {"classic_momentum": False, "trust_denominator": "separate", "clipnorm": 0.1}),
    ],
    **IDS,
)
def test_other_options(ranks, feature_kind, name, options):
    _compare(ranks, feature_kind, name, options)


@pytest.mark.parametrize(
    "name",
    [
        "LAMB",
        "LARS",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("RowWiseAdagrad", "LazyAdam")),
    ],
)
def test_sparse_gradients(ranks, feature_kind, name):
    results = ranks.run_sizes((1, 2), cases.train_embedding, name, kind=feature_kind)
    assert_invariant(results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["LazyAdam", *(pytest.param(n, marks=pytest.mark.slow) for n in ("RowWiseAdagrad", "SGD"))],
)
@KINDS
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_touches_no_whole_table(ranks, kind, size, name):
    """So it does not cost more if the table has more rows."""
    for result in ranks(size, kind).run(cases.whole_table_operations, name):
        assert not result["whole"]
        assert {"ResourceGather", "ResourceScatterSub"} <= set(result["kinds"])


def test_mixed_precision(ranks, feature_kind):
    """The replicas' sums round differently in half precision, but identically on all ranks."""
    results = ranks.run_sizes((1, 2), cases.train, "LAMB", {}, "mixed_float16", kind=feature_kind)
    assert_same_bits(results[2])
    assert_invariant(results, rtol=5e-2, atol=1e-2)
