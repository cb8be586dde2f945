"""Checks that custom steps on several replicas give the results of one."""

import pytest

from tests.harness.pool import RankFailure
from tests.strategies.compare import assert_invariant
from tests.strategies.contract import custom_step_cases as cases
from tests.strategies.contract.custom_steps import EXAMPLES

EXACT = {"rtol": 1e-10, "atol": 1e-10}
ROUNDED = {"rtol": 2e-2, "atol": 2e-3}
LIKE_ANOTHER = ("cyclegan", "wgan_gp", "simclr", "masked_language", "ddpm")
OWN_OPTIMIZER = "must apply the model's own optimizer once"
AS_THEY_ARE = "must return metrics' results unchanged.*Received: 'decibel', computed from"
# Refused by synchronous parameter servers.
REFUSED = {
    "dcgan": OWN_OPTIMIZER,
    "wgan_gp": OWN_OPTIMIZER,
    "cyclegan": OWN_OPTIMIZER,
    "ddpm": OWN_OPTIMIZER,
    "simclr": "must not exchange anything between its workers.*Received: `all_gather`",
    "derived_logs": AS_THEY_ARE,
}
# Additional kinds and sizes, in the slow tier.
OPTIONS = {
    "accumulate": ({"accumulate": 2}, ["vae", "guide", "siamese", "added_losses"], EXACT),
    "eager": ({"run_eagerly": True}, ["vae", "guide", "siamese", "added_losses"], EXACT),
    "weighted": ({"weighted": True}, ["guide"], EXACT),
    "few rows": ({"rows": 10}, ["vae", "wgan_gp", "simclr", "masked_language"], EXACT),
    "float16": ({"dtype": "mixed_float16"}, ["guide", "masked_language"], ROUNDED),
}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("horovod", 2),
        pytest.param("mirrored", 3, marks=pytest.mark.slow),
        pytest.param("multi_worker", 2, marks=pytest.mark.slow),
        pytest.param("parameter_server", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name",
    # One GAN and one contrastive model by default; the other GANs take longest.
    [pytest.param(n, marks=pytest.mark.slow) if n in LIKE_ANOTHER else n for n in EXAMPLES],
)
def test_examples_of_keras_io(ranks, name, kind, size):
    if kind == "parameter_server" and name in REFUSED:
        with pytest.raises(RankFailure, match=REFUSED[name]):
            ranks(size, kind).run(cases.train, name)
        return
    assert_invariant(ranks.run_sizes((1, size), cases.train, name, kind=kind), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("mirrored", 3), ("horovod", 2)])
@pytest.mark.parametrize(
    ("how", "name"), [(how, name) for how, (_, names, _) in OPTIONS.items() for name in names]
)
def test_examples_with_options(ranks, how, name, kind, size):
    options, _, tolerance = OPTIONS[how]
    results = ranks.run_sizes((1, size), cases.train_with, name, options, kind=kind)
    assert_invariant(results, **tolerance)


def test_logs_computed_from_metrics_while_gradients_are_accumulated(ranks):
    with pytest.raises(RankFailure, match=AS_THEY_ARE):
        ranks(2).run(cases.train_with, "derived_logs", {"accumulate": 2})
