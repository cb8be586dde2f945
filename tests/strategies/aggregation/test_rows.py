"""Checks that repeated embedding rows in a batch give the results of the dense gradient."""

import numpy as np
import pytest

from tests.strategies.aggregation import rows_cases as cases
from tests.strategies.compare import assert_close, assert_invariant
from tfdml.compression import Float16, PowerSGD

EXACT = {"rtol": 1e-9, "atol": 1e-12}
# A few run by default, the others are slow tests.
QUICK = {"adamw", "scaled", "row_wise_adagrad"}
# Rows without a gradient rest, but dense gradients have all rows.
LAZY = "lazy_adam"
AS_DENSE = [name for name in cases.OPTIMIZERS if name != LAZY]


def _each(names, quick=QUICK):
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("optimizer", _each(AS_DENSE))
@pytest.mark.parametrize("kind", ["horovod", *_each(["mirrored", "multi_worker"])])
def test_table_trains_like_a_matrix(ranks, kind, optimizer):
    (matrix,) = ranks(1).run(cases.train, optimizer, True)
    sizes = (1, 3) if kind == "mirrored" else (1, 2)
    tables = ranks.run_sizes(sizes, cases.train, optimizer, kind=kind)
    assert_invariant(tables, **EXACT)
    assert_close(matrix["predictions"], tables[1][0]["predictions"], **EXACT)
    assert_close(_flat(matrix), _flat(tables[1][0]), **EXACT)


@pytest.mark.parametrize("kind", ["horovod", *_each(["mirrored", "multi_worker"])])
def test_rows_without_gradients_rest(ranks, kind):
    sizes = (1, 3) if kind == "mirrored" else (1, 2)
    assert_invariant(ranks.run_sizes(sizes, cases.train, LAZY, kind=kind), **EXACT)


def test_rows_rest_where_xla_compiles(ranks):
    expected, *compiled = (
        ranks(size).run(cases.train, LAZY, False, (("jit_compile", jit),))[0]
        for size, jit in ((1, False), (1, True), (2, True))
    )
    for result in compiled:
        assert_close(_flat(expected), _flat(result), **EXACT)


def test_rows_rest_on_parameter_servers(ranks, cluster):
    (one,) = ranks(1).run(cases.train, LAZY)
    for case in (cases.train, cases.train_asynchronously):
        assert_close(_flat(one), _flat(cluster.run(case, LAZY)), **EXACT)


def test_one_replica_compiled_by_xla(ranks):
    (matrix,) = ranks(1).run(cases.train, "adam", True)
    (table,) = ranks(1).run(cases.train, "adam", False, (("jit_compile", True),))
    assert_close(_flat(matrix), _flat(table), **EXACT)


@pytest.mark.parametrize("kind", ["horovod", "mirrored"])
@pytest.mark.parametrize(
    "compression", [PowerSGD(rank=1), pytest.param(Float16(), marks=pytest.mark.slow)], ids=repr
)
def test_with_compression_rows_stay_exact(ranks, kind, compression):
    """Embeddings and small gradients are not compressed; the dense gradient is."""

    def run(one_hot):
        return ranks(2, kind).run(_compressed, compression, one_hot)

    for table, matrix in zip(run(False), run(True), strict=True):
        assert_close(matrix, table, rtol=1e-3, atol=1e-3)


def _compressed(compression, one_hot):
    return cases.train("adam", one_hot, compression=compression)["predictions"]


@pytest.mark.parametrize(
    "optimizer", _each(("adam", "adagrad", "scaled", "row_wise_adagrad"), quick={"adam"})
)
@pytest.mark.parametrize("case", [cases.train, cases.train_asynchronously])
def test_on_parameter_servers(ranks, cluster, case, optimizer):
    (matrix,) = ranks(1).run(cases.train, optimizer, True)
    table = cluster.run(case, optimizer)
    assert_close(matrix["predictions"], table["predictions"], **EXACT)
    assert_close(_flat(matrix), _flat(table), **EXACT)


def _flat(result):
    return np.concatenate([np.ravel(weight) for weight in result["weights"]])
