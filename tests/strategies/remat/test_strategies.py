"""Checks blocks under every strategy: the numbers without them, and those of one process."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.harness.server_cluster import ServerCluster
from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.remat import cases


@pytest.mark.parametrize(
    ("how", "model"),
    [
        ("block", "dense"),
        pytest.param("full", "dense", marks=pytest.mark.slow),
        pytest.param("keras.remat", "dense", marks=pytest.mark.slow),
        pytest.param("block", "sequence", marks=pytest.mark.slow),
        pytest.param("list_of_layers", "sequence", marks=pytest.mark.slow),
    ],
)
def test_same_bits_as_without_blocks(ranks, feature_kind, how, model):
    """Each replica draws other masks, so only the same job has them."""
    plain = ranks(2, feature_kind).run(cases.on_replicas, cases.reference(how), model)
    ours = ranks(2, feature_kind).run(cases.on_replicas, how, model)
    assert_same_bits(ours)
    assert_close(plain, ours, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "full"])
def test_numbers_of_one_process(ranks, kind, how):
    """Statistics of `BatchNormalization` are those of a replica, so there is none here.

    The one process has a strategy, too: Keras alone lets Adam square rows of an embedding that come
    twice before it adds them up.
    """
    (plain,) = ranks(1).run(cases.on_replicas, "none", "sequence", False)
    for ours in ranks(2, kind).run(cases.on_replicas, how, "sequence", False):
        assert_close(plain, ours, rtol=0, atol=1e-10)


OPTIONS = {
    "accumulation": {"accumulation": 2},
    "eager": {"run_eagerly": True},
    "jit": {"jit_compile": True},
    "half": {"policy": "mixed_float16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_training(ranks, feature_kind, option):
    if feature_kind == "parameter_server" and option in ("jit", "eager"):
        pytest.skip("Parameter servers refuse it, see the table of combinations.")
    plain = ranks(2, feature_kind).run(_with, "none", option)
    ours = ranks(2, feature_kind).run(_with, "block", option)
    assert_close(plain, ours, rtol=0, atol=1e-12 if option == "jit" else 0)


def _with(how: str, option: str) -> dict:
    # Grappler orders factors in another way where no block is around them, which 11 bits show.
    as_written = cases.no_arithmetic_of_grappler if option == "half" else contextlib.nullcontext
    with as_written():
        return cases.on_replicas(how, "dense", **OPTIONS[option])


@pytest.fixture(scope="module")
def one_worker() -> Iterator[ServerCluster]:
    """A cluster whose single worker takes asynchronous steps one after the other."""
    running = ServerCluster(workers=1, servers=1)
    yield running
    running.close()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "model"), [("block", "dense"), ("list_of_layers", "sequence")])
def test_asynchronous_parameter_servers(one_worker, how, model):
    plain, ours = (one_worker.run(cases.asynchronously, each, model) for each in ("none", how))
    assert_close(plain, ours, rtol=0, atol=0)
