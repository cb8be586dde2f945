"""Checks the all-reduce that Horovod is built with: its values, and their order of additions."""

from functools import reduce

import numpy as np
import pytest

from tests.compression import training_cases
from tests.horovod_build import allreduce_cases as cases
from tests.strategies.compare import assert_same_bits
from tfdml.collectives.buckets import BUCKET_BYTES

TYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]
FUNCTIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
# Number of ranks and of hosts, and the ranks of each host.
JOBS = {
    (2, 1): [[0, 1]],
    (3, 1): [[0, 1, 2]],
    (4, 1): [[0, 1, 2, 3]],
    (2, 2): [[0], [1]],
    (3, 2): [[0, 1], [2]],
    (4, 2): [[0, 1], [2, 3]],
    (5, 3): [[0, 1], [2, 3], [4]],
}


def expected(hosts: list[list[int]], length: int, dtype: str, function: np.ufunc) -> np.ndarray:
    """Adds in the order that is promised: a host's ranks, then hosts."""
    own = [reduce(function, [cases.values(r, length, dtype) for r in ranks]) for ranks in hosts]
    return reduce(function, own)


@pytest.mark.parametrize(("size", "hosts"), JOBS)
def test_sums_have_one_order_alone_and_fused(ranks, size, hosts):
    wanted = [expected(JOBS[size, hosts], n, "float32", np.add) for n in cases.LENGTHS]
    for result in ranks(size, hosts=hosts).run(cases.alone_and_fused):
        for name, sums in result.items():
            for length, own, right in zip(cases.LENGTHS, sums, wanted, strict=True):
                assert own.tobytes() == right.tobytes(), (name, length)


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_type_and_operation(ranks, size, operation):
    for dtype in TYPES:
        wanted = [expected(JOBS[size, 1], n, dtype, FUNCTIONS[operation]) for n in (7, 30_001)]
        for result in ranks(size).run(cases.reduced, dtype, operation):
            for own, right in zip(result, wanted, strict=True):
                np.testing.assert_array_equal(own, right, err_msg=dtype, strict=True)


@pytest.mark.slow
def test_training_does_not_depend_on_what_is_fused(ranks):
    first = ranks(3).run(training_cases.train, None)
    assert_same_bits(first)
    for bucket_bytes in (BUCKET_BYTES, 20_000, 1000):
        again = ranks(3).run(training_cases.train, None, "float32", 1, None, None, bucket_bytes)
        for one, other in zip(first[0]["weights"], again[0]["weights"], strict=True):
            assert one.tobytes() == other.tobytes()
