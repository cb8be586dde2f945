"""Checks training with a robust rule: its numbers, and what a wrong rank does to them."""

from collections.abc import Iterator

import pytest

from tests.harness.server_cluster import ServerCluster
from tests.strategies.aggregation import robust_cases as cases
from tests.strategies.compare import assert_close, assert_same_bits
from tfdml.aggregation import CenteredClipping, TrimmedMean

RULES = ["trimmed", "clipped"]


@pytest.fixture(scope="module")
def three_workers() -> Iterator[ServerCluster]:
    """A cluster of three workers, of which one can be outvoted."""
    running = ServerCluster(workers=3, servers=1)
    yield running
    running.close()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "kind",
    ["horovod", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mirrored", "multi_worker"))],
)
def test_training_is_that_of_one_process_that_plays_all_ranks(ranks, kind, rule):
    """The last batch has 2 rows for 3 ranks."""
    expected = ranks(1).run(cases.oracle, rule, 3, 1)[0]
    results = ranks(3, kind).run(cases.train, rule, 3, 1)
    assert_same_bits(results)
    for result in results:
        assert_close(expected["weights"], result["weights"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "devices", "accumulate"),
    [
        # A single rank clips and averages its own gradients.
        (1, 1, 1),
        pytest.param(3, 2, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_what_a_rank_sends_is_the_mean_of_its_rows(ranks, size, devices, accumulate):
    """Rows of its devices, and of several steps, count together."""
    expected = ranks(1).run(cases.oracle, "clipped", size, None, accumulate)[0]
    steps = None if accumulate == 1 else accumulate
    for result in ranks(size).run(cases.train, "clipped", size, None, devices, steps):
        assert_close(expected["weights"], result["weights"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [pytest.param(50.0, marks=pytest.mark.slow), float("nan")])
def test_a_wrong_rank_does_little_and_is_named(ranks, value):
    plain = ranks(3).run(cases.train, None, 3, None, 1, None, "convolutional")[0]
    wrong = (3, 1, 1, None, "convolutional", value)
    mean = ranks(3).run(cases.train, None, *wrong)[0]
    assert not mean["clean"] < plain["clean"] + 1
    for rule in RULES:
        robust = ranks(3).run(cases.train, rule, *wrong)[0]
        assert robust["clean"] < plain["clean"] + 0.3
        (worst,) = [rank for rank in robust["outliers"][-1] if rank.often > 0.5]
        assert worst.rank == 1
        assert worst.distance > 3 or worst.not_finite == 5


@pytest.mark.parametrize("rule", [TrimmedMean(0), CenteredClipping(float("inf"), momentum=0.0)])
def test_a_rule_that_leaves_nothing_out_is_the_mean(ranks, rule):
    plain = ranks(2).run(cases.train, None, 2)
    robust = ranks(2).run(cases.train, rule, 2)
    for one, other in zip(plain, robust, strict=True):
        assert_close(one["weights"], other["weights"], rtol=1e-5, atol=1e-6)
        assert_close(one["history"], other["history"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["horovod", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_momentum_resumes_with_the_same_bits(ranks, kind, tmp_path):
    results = ranks(2, kind).run(cases.resumed_with_the_same_bits, "clipped", str(tmp_path))
    for whole, stopped in results:
        assert_same_bits([whole, stopped])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("mean", "`gradient_aggregation` must be a rule of `tfdml.aggregation`"),
        ("trimmed", "more than 2 * num_byzantine ranks are needed"),
    ],
)
def test_wrong_rules_are_refused(ranks, rule, words):
    for message in ranks(2).run(cases.error_of, rule):
        assert words in message


@pytest.mark.slow
def test_synchronous_servers_combine_what_workers_send(ranks, three_workers):
    expected = ranks(1).run(cases.oracle, "trimmed", 3, 1)[0]
    found = three_workers.run(cases.train, "trimmed", 3, 1)
    assert_close(expected["weights"], found["weights"], rtol=1e-4, atol=1e-5)
    assert "keep nothing from step to step" in three_workers.run(cases.error_of, "clipped")
