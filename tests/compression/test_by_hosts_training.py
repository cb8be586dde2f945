"""Checks training on real ranks of two hosts, whose gradients are summed within hosts first."""

import shutil

import numpy as np
import pytest

from tests.compression import by_hosts_cases as cases
from tests.strategies.compare import assert_close, assert_same_bits

BOTH = pytest.mark.parametrize(
    "kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)]
)


@BOTH
@pytest.mark.parametrize(
    "size", [pytest.param(3, id="2+1"), pytest.param(4, id="2+2", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("compressor", ["int8", pytest.param("onebit", marks=pytest.mark.slow)])
def test_training_is_bit_identical_on_all_ranks_and_converges(ranks, kind, size, compressor):
    pool = ranks(size, kind, hosts=2)
    results = pool.run(cases.train, compressor)
    assert_same_bits(results)
    loss, at_once = (
        r[0]["history"]["loss"] for r in (results, pool.run(cases.train, compressor, False))
    )
    assert loss[-1] < 0.9 * loss[0]
    np.testing.assert_allclose(loss, at_once, rtol=0.05)
    # The hosts' sums were encoded, not the ranks' gradients: the numbers are others.
    assert list(loss) != list(at_once)


@BOTH
def test_all_ranks_see_the_hosts_and_measure_one_answer(ranks, kind):
    hosts, faster = zip(*ranks(3, kind, hosts=2).run(cases.measured), strict=True)
    assert set(hosts) == {((0, 1), (2,))}
    assert len(set(faster)) == 1
    assert ranks(3, kind).run(cases.measured_hosts) == [((0, 1, 2),)] * 3


@pytest.mark.slow
@BOTH
def test_with_devices_accumulation_and_half_precision(ranks, kind):
    for options in (
        {"devices": 2},
        {"accumulate": 2},
        {"policy": "mixed_float16"},
    ):
        assert_same_bits(ranks(3, kind, hosts=2).run(cases.train_with, "int8", options))


@pytest.mark.slow
@BOTH
def test_all_ranks_skip_a_step_that_overflows_on_the_last(ranks, kind):
    options = {"policy": "mixed_float16", "overflow_at": 2}
    for result in ranks(3, kind, hosts=2).run(cases.train_with, "int8", options):
        assert result["unchanged"]
        assert all(result["unchanged"])
        assert all(result["weights_kept"])


@pytest.mark.slow
@BOTH
def test_a_resumed_job_has_the_same_bits(ranks, kind, tmp_path):
    pool = ranks(3, kind, hosts=2)
    whole = pool.run(cases.resumed, str(tmp_path / "whole"), 3)[0]
    pool.run(cases.resumed, str(tmp_path / "parts"), 1)
    parts = pool.run(cases.resumed, str(tmp_path / "parts"), 3)[0]
    assert_close(whole["weights"], parts["weights"], rtol=0, atol=0, where="")
    # On other hosts it continues, too.
    shutil.copytree(
        tmp_path / "parts", tmp_path / "elsewhere", ignore=shutil.ignore_patterns("lock")
    )
    elsewhere = ranks(2, kind).run(cases.resumed, str(tmp_path / "elsewhere"), 4)[0]
    assert np.isfinite(elsewhere["history"]["loss"]).all()
