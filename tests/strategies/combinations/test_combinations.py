"""Checks that every pair of features has the outcome of the table: equal, refused, or apart."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfdml
from tests.harness.server_cluster import ServerCluster
from tests.strategies.combinations import cases as cases
from tests.strategies.combinations.elastic_job import JOINS_AT, LOST, elastic
from tests.strategies.combinations.table import (
    ARGUMENTS,
    CODECS,
    FEATURES,
    ONE_CODEC,
    TABLE,
    Apart,
    Equal,
    Refused,
)
from tests.strategies.compare import assert_close, assert_same_bits

SERVERS = {"ps_sync", "ps_async"}
GUARANTEES = Path(__file__).resolve().parents[3] / "docs" / "guarantees.md"


def _pairs(kind: type) -> list:
    """Returns the pairs with an outcome of this kind as test parameters."""
    pairs = []
    for feature, row in TABLE.items():
        for other, outcome in row.items():
            if isinstance(outcome, kind):
                by_default = getattr(outcome, "by_default", True)
                marks = () if by_default else (pytest.mark.slow,)
                pair = (other, feature)
                pairs.append(pytest.param(pair, outcome, marks=marks, id="-".join(pair)))
    return pairs


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> str:
    """Writes the data sets of the mixture."""
    directory = str(tmp_path_factory.mktemp("mixture"))
    cases.write_mixture(directory)
    return directory


@pytest.fixture(scope="module")
def one_worker() -> Iterator[ServerCluster]:
    """A cluster whose single worker takes asynchronous steps one after the other."""
    running = ServerCluster(workers=1, servers=1)
    yield running
    running.close()


def test_every_pair_is_in_the_table():
    assert list(TABLE) == list(FEATURES), "Each feature has a row, in the order of `FEATURES`."
    names = list(FEATURES)
    for number, (feature, row) in enumerate(TABLE.items()):
        missing = set(names[:number]) ^ set(row)
        assert not missing, f"The row of {feature!r} must say how it meets {sorted(missing)}."


def test_every_compressor_belongs_to_a_family():
    found = {
        name
        for name in tfdml.compression.__all__
        if inspect.isclass(getattr(tfdml.compression, name)) and name != "Compressor"
    }
    listed = ", ".join(FEATURES[family] for family in CODECS).split(", ")
    assert sorted(listed) == sorted(found), "Add it to a family in `FEATURES`, or one for it."
    for family in CODECS:
        assert type(cases.CODECS[family]).__name__ in FEATURES[family]


def test_every_argument_of_a_strategy_is_listed():
    strategies = [getattr(tfdml.strategies, name) for name in tfdml.strategies.__all__]
    found = {
        name
        for strategy in strategies
        if inspect.isclass(strategy)
        for name in inspect.signature(strategy).parameters
    }
    assert found == set(ARGUMENTS), "Say in `ARGUMENTS` which feature it is, and give it a row."
    assert {feature for feature in ARGUMENTS.values() if feature} <= set(FEATURES)


def test_guarantees_list_refused_pairs():
    text = GUARANTEES.read_text(encoding="utf-8").partition("## Features together")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert any("a compressor | another compressor" in line for line in lines)
    names = {name: api_names.partition("(")[0].split(", ") for name, api_names in FEATURES.items()}
    for pair in (p.values[0] for p in _pairs(Refused) + _pairs(Apart)):
        if TABLE[pair[1]][pair[0]] is ONE_CODEC or set(pair) == SERVERS:
            continue
        wanted = [name.split(" of several")[0] for feature in pair for name in names[feature]]
        assert any(all(name in line for name in wanted) for line in lines), pair


@pytest.mark.parametrize(("pair", "outcome"), _pairs(Equal))
def test_compatible_pairs_give_equal_results(
    ranks, request, tmp_path, records, pair: tuple[str, str], outcome: Equal
):
    tolerance = {"rtol": outcome.rtol, "atol": outcome.atol}
    if "elastic" in pair:
        (feature,) = set(pair) - {"elastic"}
        _assert_elastic_equal(ranks, tmp_path, records, feature, tolerance)
        return
    codecs = [name for name in pair if name in CODECS][:1]
    # With these two, gradients are not summed by hosts.
    if "hosts" in pair and not codecs and not {"sharding", "robust"} & set(pair):
        codecs = ["quantising"]
    rows = ["mixed_rows"] if "mixed_data" in pair else []
    rows += ["whole_tables"] if "tables" in pair else []
    is_local = bool({"local_updates", "synchronous_hosts"} & set(pair))
    rows += ["no_momentum"] if is_local and codecs else []
    if SERVERS & set(pair):
        # Without distribution and without the codec.
        expected = _reference(ranks, records, 1, *rows)
        fixture = "cluster" if "ps_sync" in pair else "one_worker"
        running = request.getfixturevalue(fixture)
        results = [running.run(cases.trained, pair, records, str(tmp_path))]
    else:
        encodes_both_ways = codecs if "sharding" not in pair else []
        by_hosts = bool({"hosts", "synchronous_hosts"} & set(pair))
        selects = by_hosts and bool(set(codecs) & set(cases.SELECTING_ALL))
        alone = [*encodes_both_ways, "all_values"] if selects else encodes_both_ways
        expected = _reference(ranks, records, 2 if encodes_both_ways else 1, *alone, *rows)
        kind = "multi_worker" if "synchronous_hosts" in pair else "horovod"
        job = ranks(4, kind, hosts=2) if by_hosts else ranks(2)
        results = job.run(cases.trained, pair, records, str(tmp_path))
    assert_same_bits(results)
    for result in results:
        _assert_alike(expected, result, **tolerance)
    selects_all = {"hosts", "synchronous_hosts", "sharding"} & set(pair) and set(codecs) & set(
        cases.SELECTING_ALL
    )
    if codecs and not selects_all:
        _assert_compressed(_reference(ranks, records, 1, *rows), results[0])


def _reference(ranks, records: str, size: int, *features: str) -> dict:
    """Returns the result of a job, which is trained once for all comparisons."""
    return ranks.run_sizes((size,), cases.trained, features, records)[size][0]


def _assert_alike(expected: dict, result: dict, **tolerance: float) -> None:
    """Asserts that weights, slots and, if present, histories are close."""
    assert {"weights", "slots"} <= result.keys()
    assert_close({name: expected[name] for name in result}, result, **tolerance)


def _assert_compressed(plain: dict, result: dict) -> None:
    """Asserts that the results differ from a training without the codec."""
    with pytest.raises(AssertionError):
        assert_close(plain["weights"], result["weights"], rtol=0, atol=5e-7)


def _assert_elastic_equal(ranks, tmp_path, records: str, feature: str, tolerance: dict) -> None:
    joining = 4 if feature == "hosts" else 2
    if feature in CODECS or feature == "hosts":
        result = elastic(tmp_path, records, feature)
        codec = "quantising" if feature == "hosts" else feature
        expected = ranks(2).run(cases.joined, (codec,), JOINS_AT)[0]
        result.pop("history")  # It is that of the whole epoch.
        sizes = [1] * JOINS_AT + [joining] * (cases.ROWS // cases.BATCH - JOINS_AT)
    else:
        result = elastic(tmp_path, records, feature, LOST)
        rows = ["mixed_rows"] if feature == "mixed_data" else []
        expected = _reference(ranks, records, 1, *rows)
        sizes = None
    seen = result.pop("sizes")
    assert set(seen) == {1, joining}
    assert sizes in (None, seen)
    _assert_alike(expected, result, **tolerance)


@pytest.mark.parametrize(("pair", "outcome"), _pairs(Refused))
def test_refused_pairs_raise(
    ranks, request, monkeypatch, records, pair: tuple[str, str], outcome: Refused
):
    if SERVERS & set(pair):
        fixture = "cluster" if "ps_sync" in pair else "one_worker"
        messages = [request.getfixturevalue(fixture).run(cases.error_of, pair, records)]
    elif "tables" in pair and "elastic" in pair:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
        messages = [cases.error_of(pair, records)]
    elif "tables" in pair:
        # A single process has whole tables.
        messages = ranks(2).run(cases.error_of, pair, records)
    else:
        messages = [cases.error_of(pair, records)]
    for message in messages:
        assert outcome.message in message


@pytest.mark.parametrize(("pair", "outcome"), _pairs(Apart))
def test_pairs_of_different_jobs_raise(ranks, pair: tuple[str, str], outcome: Apart):
    assert outcome.why
    for message in ranks(2 if "elastic" in pair else 1).run(cases.error_of, pair):
        assert outcome.message in message


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
def test_elastic_refuses_models_on_parameter_servers(one_worker, synchronous):
    """`KerasState` accepts models of any strategy; those of parameter servers have no ranks."""
    message = one_worker.run(cases.elastic_on_servers, synchronous)
    assert "`model` must be made in the scope of a `HorovodStrategy`" in message
