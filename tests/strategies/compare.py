"""Assertions that compare the results of jobs of different sizes."""

from typing import Any

import numpy as np


def assert_same_bits(results: list[dict]) -> None:
    """Asserts that all ranks of one job have bit-identical weights."""
    first, *others = results
    for rank, other in enumerate(others, start=1):
        for i, (a, b) in enumerate(zip(first["weights"], other["weights"], strict=True)):
            assert a.tobytes() == b.tobytes(), f"weight {i} differs between ranks 0 and {rank}"


def assert_close(one: Any, many: Any, rtol: float = 1e-5, atol: float = 2e-6, where="") -> None:
    """Asserts that two structures of arrays are equal up to rounding."""
    if isinstance(one, dict):
        assert one.keys() == many.keys(), where
        for key in one:
            assert_close(one[key], many[key], rtol, atol, f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(many), where
        for i, (a, b) in enumerate(zip(one, many, strict=True)):
            assert_close(a, b, rtol, atol, f"{where}/{i}")
    else:
        np.testing.assert_allclose(many, one, rtol=rtol, atol=atol, err_msg=where)


def assert_invariant(results: dict[int, list[dict]], **tolerance: float) -> None:
    """Asserts that every rank of every job has the result of one process.

    Args:
        results: Results of each rank, by the size of the job; sizes include 1.
        **tolerance: `rtol` and `atol`.
    """
    (one,) = results[1]
    for size, ranks in results.items():
        assert_same_bits(ranks)
        for rank, result in enumerate(ranks):
            assert_close(one, result, where=f"size {size}, rank {rank}: ", **tolerance)
