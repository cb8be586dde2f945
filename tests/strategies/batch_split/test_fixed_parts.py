"""Checks that parts of any size give one process's numbers, and use every sample once."""

import pytest

from tests.strategies.batch_split import cases
from tests.strategies.compare import assert_close, assert_same_bits
from tfdml.data.read.ledger import Account

CLOSE = {"rtol": 1e-14, "atol": 1e-14}


def _assert_equal(ranks, results: list, source: str = "arrays", model: str = "dense") -> None:
    """Asserts that each rank has one process's numbers."""
    (one,) = ranks.run_sizes((1,), cases.fitted, None, source, 1, model)[1]
    assert_same_bits(results)
    for result in results:
        assert_close(one, result, **CLOSE)


# The others are slow tests: they differ in who reads the data.
DEFAULT = {("arrays", "auto"), ("known", "auto"), ("arrays", "[5, 1]")}
DATA = [
    pytest.param(
        source,
        batch_split,
        id=f"{source}-{batch_split}",
        marks=() if (source, str(batch_split)) in DEFAULT else pytest.mark.slow,
    )
    for source in cases.SOURCES
    for batch_split in ([5, 1], "auto")
]


@pytest.mark.parametrize(("source", "batch_split"), DATA)
def test_data_on_two_ranks(ranks, source, batch_split):
    _assert_equal(ranks, ranks(2).run(cases.fitted, batch_split, source), source)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("records"))
    cases.write_records(directory)
    return directory


@pytest.mark.parametrize(
    "batch_split", [[5, 1], pytest.param("auto", marks=pytest.mark.slow)], ids=str
)
def test_records_on_two_ranks(ranks, records, tmp_path, batch_split):
    case = ("records", 1, "dense", records)
    (one,) = ranks(1).run(cases.fitted, None, *case)
    for result in ranks(2).run(cases.fitted, batch_split, *case, str(tmp_path)):
        assert_close(one, result, **CLOSE)
    used = Account(str(tmp_path))
    assert not used.problems
    assert used.epochs == dict.fromkeys(range(cases.EPOCHS), cases.ROWS)


@pytest.mark.slow  # Other parts of the same data.
@pytest.mark.parametrize("batch_split", [[1, 3], [3, 2], [1000, 1]], ids=str)
def test_parts_on_two_ranks(ranks, batch_split):
    _assert_equal(ranks, ranks(2).run(cases.fitted, batch_split, "arrays"))


@pytest.mark.parametrize("batch_split", [[3, 2, 1], "auto"], ids=str)
@pytest.mark.parametrize("source", ["arrays", pytest.param("known", marks=pytest.mark.slow)])
def test_devices_of_one_process(ranks, source, batch_split):
    _assert_equal(ranks, ranks(3, "mirrored").run(cases.fitted, batch_split, source), source)


@pytest.mark.slow
def test_workers_with_two_devices(ranks):
    results = ranks(2, "multi_worker").run(cases.fitted, [5, 3, 1, 2], "arrays", 2)
    _assert_equal(ranks, results)


@pytest.mark.parametrize(
    "batch_split", [[5, 1], pytest.param("auto", marks=pytest.mark.slow)], ids=str
)
def test_synchronous_parameter_servers(ranks, cluster, batch_split):
    _assert_equal(ranks, [cluster.run(cases.fitted, batch_split, "arrays")])


def test_servers_send_each_worker_its_own_part(cluster):
    assert cluster.run(cases.workers_of_shares) == [{0: 0, 1: 1}] * 4
