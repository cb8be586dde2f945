"""Checks that inputs, layers and steps accepted by Keras equal one process on replicas."""

import numpy as np
import pytest

from tests.strategies.compare import assert_invariant
from tests.strategies.contract import fit_cases, step_cases

# Keras rounds these layers' biases, and so their gradients, to bfloat16.
TOLERANCE = {
    step_cases.float8: {"rtol": 1e-2, "atol": 1e-3},
    step_cases.synchronized: {"rtol": 1e-9, "atol": 1e-9},
}
QUICK = [
    (step_cases.own_numbers,),
    (step_cases.on_batches, True),
    (step_cases.on_batches, False, True, False),
    (step_cases.several_inner_optimizers,),
    (step_cases.float8,),
    (step_cases.missing_input, "dataset"),
    (step_cases.sparse_input, "dataset"),
    (step_cases.predicted_rows, "ragged"),
    (fit_cases.distributed_data, "fit"),
    (step_cases.synchronized, "masked"),
    (step_cases.synchronized, "few"),
    (step_cases.synchronized, "unequal"),
    (step_cases.synchronized, "lost"),
]
SLOW = [
    (step_cases.float8, 2),
    (step_cases.missing_input, "arrays"),
    (step_cases.missing_input, "generator"),
    (step_cases.sparse_input, "scipy"),
    (step_cases.sparse_input, "tensor"),
    (step_cases.predicted_rows, "sparse"),
    (fit_cases.distributed_data, "evaluate"),
    (fit_cases.distributed_data, "predict"),
]


@pytest.mark.parametrize(
    ("kind", "size"), [pytest.param("mirrored", 3, marks=pytest.mark.slow), ("horovod", 2)]
)
@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: "-".join(getattr(part, "__name__", str(part)) for part in case),
)
def test_results_equal_one_process(ranks, kind, size, case):
    results = ranks.run_sizes((1, size), *case, kind=kind)
    assert_invariant(results, **TOLERANCE.get(case[0], {}))


def test_all_rows_come_back(ranks):
    for found in ranks(2).run(step_cases.predicted_rows, "ragged"):
        np.testing.assert_array_equal(found["values"], 2.0 * np.arange(1, 1 + len(found["values"])))
        assert len(found["lengths"]) == 13
