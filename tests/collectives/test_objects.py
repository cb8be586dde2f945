"""Checks a function that rank 0 calls for all ranks."""

import pytest

from tests.collectives import object_cases as cases
from tfdml.collectives.collective import LocalCollective
from tfdml.collectives.objects import call_on_rank_0


@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_all_ranks_get_what_rank_0_returns(ranks, kind):
    """Of any size, by as many calls; only rank 0 calls the function."""
    chief, other = ranks(2, kind).run(cases.answers)
    assert chief["calls"] == len(cases.ANSWERS)
    assert other["calls"] == 0
    assert chief["answers"] == other["answers"] == cases.ANSWERS


@pytest.mark.parametrize(
    ("kind", "types", "text"),
    [
        ("known", ["KeyError", "KeyError"], "'rate'"),
        ("uncopyable", ["_Uncopyable", "RuntimeError"], "2 of 3"),
        ("unpicklable", ["TypeError", "TypeError"], "must return what can be pickled"),
    ],
)
def test_all_ranks_get_the_error(ranks, kind, types, text):
    """And go on: the next call works."""
    found = ranks(2).run(cases.error, kind)
    assert [name for name, _, _ in found] == types
    assert all(text in message for _, message, _ in found)
    assert [answer for _, _, answer in found] == ["next", "next"]


def test_one_process_gets_the_object_itself():
    answer = object()
    assert call_on_rank_0(LocalCollective(), lambda: answer, "name") is answer


def test_a_call_in_a_step_is_refused(ranks):
    (message,) = ranks(1).run(cases.in_a_graph)
    assert "`call_on_chief` must be called outside of steps" in message
