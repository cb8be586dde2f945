"""Checks the all-gather and the all-to-all that Horovod is built with, for all sizes of parts."""

import numpy as np
import pytest

from tests.horovod_build import rows_cases as cases

# Number of ranks and of hosts.
JOBS = [(2, 1), (3, 1), (2, 2), (3, 2), (4, 2)]


@pytest.mark.parametrize(("size", "hosts"), JOBS)
def test_gathered_parts_of_all_sizes(ranks, size, hosts):
    wanted = [
        np.concatenate([cases.part(r, 0, rows[r]) for r in range(size)]) for rows in cases.PARTS
    ]
    for result in ranks(size, hosts=hosts).run(cases.gathered):
        for got, right in zip(result, wanted * 2, strict=True):
            np.testing.assert_array_equal(got, right, strict=True)


@pytest.mark.parametrize(("size", "hosts"), JOBS)
def test_exchanged_rows_of_all_sizes(ranks, size, hosts):
    for rank, result in enumerate(ranks(size, hosts=hosts).run(cases.exchanged)):
        *of_parts, (vector, vector_counts), (empty, empty_counts) = result
        for number, (rows, counts) in enumerate(of_parts):
            sent = [cases.rows_between(r, rank, number) for r in range(size)]
            right = np.concatenate([cases.part(r, rank, n) for r, n in enumerate(sent)])
            assert counts == sent
            np.testing.assert_array_equal(rows, right, strict=True)
        assert vector.tolist() == [r * size + rank for r in range(size)]
        assert empty.shape == (size, 0)
        assert vector_counts == empty_counts == [1] * size
