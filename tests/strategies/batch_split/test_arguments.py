"""Checks that wrong parts are refused early, with the rule and the fix."""

import numpy as np
import pytest

import tfdml
from tests.strategies.batch_split import cases
from tfdml.strategies import arguments


@pytest.mark.parametrize(
    "batch_split",
    ["fast", [], [1, 0], [1, -1], [1, "2"], [True, 1], [1, float("nan")], [float("inf"), 1], 3, {}],
    ids=repr,
)
def test_parts_must_be_positive_numbers(batch_split):
    with pytest.raises(ValueError, match="`batch_split` must be a list of positive numbers") as e:
        tfdml.MirroredStrategy(["CPU:0"], batch_split=batch_split)
    assert f"Received: batch_split={batch_split!r}" in str(e.value)


def test_there_must_be_one_for_each_replica():
    with pytest.raises(ValueError, match=r"processes \(1\) times devices of each \(1\).*3 numbers"):
        tfdml.HorovodStrategy(["CPU:0"], batch_split=[1, 2, 3])


def test_numbers_of_any_kind_are_proportions():
    assert arguments.check_batch_split((np.float64(0.6), np.int64(3))) == (1, 5)
    assert arguments.check_batch_split([2, 2]) == (1, 1)
    assert arguments.check_batch_split(None) is None


def test_an_elastic_job_takes_no_numbers(monkeypatch):
    monkeypatch.setattr("tfdml.topology.is_elastic", lambda: True)
    with pytest.raises(ValueError, match="`batch_split` must be 'auto' or None in an elastic job"):
        tfdml.HorovodStrategy(batch_split=[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_split": [3, 1]}, "`batch_split` must be None without `synchronous=True`"),
        (
            {"batch_split": "auto", "synchronous": True, "backup_workers": 1},
            "`batch_split` must be numbers or None with `backup_workers`",
        ),
    ],
)
def test_parameter_servers_refuse_what_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        tfdml.ParameterServerStrategy(**options)


def test_measured_parts_need_data_that_can_be_divided(ranks):
    for message in ranks(2).run(cases.own_parts_by_speed):
        assert "`batch_split` must not be 'auto' for a dataset with AutoShardPolicy.OFF" in message


def test_different_parts_on_some_rank_are_refused(ranks):
    for message in ranks(2).run(cases.different_parts):
        assert "batch_split" in message


def test_xla_compiles_for_new_parts_and_the_step_is_traced_once(ranks):
    for traces, parts in ranks(2).run(cases.traces_with_xla):
        assert traces == 1
        assert len(set(parts)) == 3
