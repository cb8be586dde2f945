"""Checks the conclusions that rank 0 draws from the ranks' messages."""

import pytest

from tfdml.runtime.guard.verdict import (
    BYE_GRACE,
    DIFFERENT_GRACE,
    LEFT_GRACE,
    MISMATCH_GRACE,
    RAISED_GRACE,
    RankStatus,
    verdict,
    verdict_of_rank_0,
)

LIMIT = 60.0


def members(count: int = 3, **beat) -> list[RankStatus]:
    """Returns ranks last heard of at time 0, in step 5 of a `fit`."""
    found = []
    for rank in range(count):
        member = RankStatus(rank, f"node{rank}", 100 + rank, heard=0.0)
        member.hear(
            {
                "kind": "beat", "activity": "fit, step 5", "call": "fit", "calls": 1,
                "waits_for": "the exchange", "progress": 5, **beat,
            },
            0.0,
        )  # fmt: skip
        found.append(member)
    return found


def failure(call: int | None = 1, consequence: bool = False, error: str = "ValueError: no") -> dict:
    return {
        "kind": "failure", "error": error, "activity": "fit, step 6",
        "call": call, "consequence": consequence,
    }  # fmt: skip


def beat_on(found: list[RankStatus], time: float) -> None:
    for member in found:
        member.hear({**member.beat, "progress": member.beat["progress"] + 1}, time)


def test_healthy_job_continues():
    found = members()
    beat_on(found, 50.0)
    assert verdict(found, LIMIT, 51.0) is None


def test_a_broken_connection_is_a_death():
    found = members()
    found[2].lost = True
    result = verdict(found, LIMIT, 1.0)
    assert (result.rank, result.why) == (2, "died")


def test_connection_may_close_after_a_goodbye():
    found = members(waits_for=None, call=None)
    found[2].hear({"kind": "bye"}, 0.5)
    found[2].lost = True
    beat_on(found[:2], 59.0)
    assert verdict(found, LIMIT, 60.0) is None


def test_silence_beyond_the_limit_ends_the_job():
    found = members()
    beat_on(found[:2], LIMIT + 1)
    result = verdict(found, LIMIT, LIMIT + 1)
    assert result.rank == 2
    assert result.why.startswith("fell silent")
    assert verdict(found, LIMIT + 2, LIMIT + 1) is None


def test_rank_0_that_hears_nobody_is_cut_off():
    found = members()
    beat_on(found[1:2], 1.0)
    beat_on(found[:1], LIMIT + 0.5)
    result = verdict(found, LIMIT, LIMIT + 0.5)
    assert result.rank == 0
    assert result.why == "hears no other rank (for 60.5 s)"
    assert "cut off" in result.likely


def test_rank_0_that_hears_nobody_when_the_exchange_fails_is_cut_off():
    found = members()
    beat_on(found[:1], 30.0)
    found[0].hear(failure(consequence=True, error="UnknownError: "), 30.0)
    assert verdict(found, LIMIT, 30.5 + LEFT_GRACE).rank == 0
    # Of two ranks, none knows on which side the fault is.
    assert verdict(found[:2], LIMIT, 30.5 + LEFT_GRACE).rank == 1


def test_a_rank_that_gave_up_on_rank_0_is_not_dead():
    found = members()
    found[1].hear({"kind": "left", "why": "fell silent (nothing heard for 61.0 s)"}, 1.0)
    found[1].lost = True
    result = verdict(found, LIMIT, 1.0)
    assert (result.rank, result.why[:38]) == (1, "gave up on rank 0, which fell silent (")
    assert "network" in result.likely


def test_uncaught_exception_ends_the_job():
    found = members()
    found[1].hear(failure(call=None), 1.0)
    assert verdict(found, LIMIT, 1.0 + RAISED_GRACE / 2) is None
    result = verdict(found, LIMIT, 1.1 + RAISED_GRACE)
    assert (result.rank, result.error) == (1, "ValueError: no")


def test_exception_on_all_ranks_is_left_to_the_program():
    found = members()
    for member in found:
        member.hear(failure(), 1.0)
        member.hear({**member.beat, "call": None}, 1.0)
    beat_on(found, 9.0)
    assert verdict(found, LIMIT, 10.0 + LEFT_GRACE) is None


def test_rank_left_behind_in_a_call_ends():
    found = members()
    found[0].hear(failure(), 1.0)
    found[0].hear({**found[0].beat, "call": None}, 1.0)
    assert verdict(found, LIMIT, 1.0 + LEFT_GRACE / 2) is None
    beat_on(found, 6.0)
    assert verdict(found, LIMIT, 1.1 + LEFT_GRACE).rank == 0


def test_later_call_is_distinguished_from_the_left_one():
    found = members()
    found[0].hear(failure(call=1), 1.0)
    for member in found:
        member.hear({**member.beat, "calls": 2}, 2.0)
    beat_on(found, 9.0)
    assert verdict(found, LIMIT, 9.5) is None


def test_an_exception_that_was_caught_is_forgotten():
    found = members()
    for member in found:
        member.hear(failure(call=1, error="ValueError: refused"), 1.0)
        member.hear({**member.beat, "calls": 2}, 2.0)
    found[1].hear(failure(call=2, error="OSError: full"), 3.0)
    beat_on([found[0], found[2]], 9.0)
    assert verdict(found, LIMIT, 9.5).error == "OSError: full"


def test_cause_is_reported_before_its_consequences():
    """Rank 1 is stopped; 30 s later gloo gives up on the others, before the limit."""
    found = members()
    beat_on([found[0], found[2]], 30.0)
    for member in (found[0], found[2]):
        member.hear(failure(consequence=True, error="UnknownError: "), 30.0)
    beat_on([found[0], found[2]], 35.5)
    result = verdict(found, LIMIT, 30.5 + LEFT_GRACE)
    assert result.rank == 1
    assert "silent" in result.why


def test_rank_with_its_own_error_is_named_though_others_fail_first():
    found = members()
    found[0].hear(failure(consequence=True, error="UnknownError: "), 1.0)
    found[1].hear(failure(call=None, error="OSError: full"), 1.1)
    beat_on(found, 2.0)
    assert verdict(found, LIMIT, 2.5).error == "OSError: full"


def test_an_error_because_another_rank_has_ended():
    """Its exchange fails because the other one leaves: the leaving one is named."""
    found = members()
    found[1].hear({"kind": "bye"}, 1.0)
    found[0].hear(failure(call=None, consequence=True, error="UnknownError: shut down"), 1.5)
    result = verdict(found, LIMIT, 1.6 + RAISED_GRACE)
    assert (result.rank, result.error) == (1, "")
    assert "has ended its program, while rank 0 was in" in result.why


def test_waiting_for_a_rank_that_has_ended():
    found = members()
    found[1].hear({"kind": "bye"}, 1.0)
    for member in (found[0], found[2]):
        member.hear(member.beat, BYE_GRACE + 2.0)
    result = verdict(found, LIMIT, BYE_GRACE + 2.0)
    assert result.rank == 1
    assert "rank 0 waits for it in the exchange" in result.why


def test_a_rank_that_still_moves_is_not_waiting_for_one_that_has_ended():
    found = members()
    found[1].hear({"kind": "bye"}, 1.0)
    beat_on([found[0], found[2]], BYE_GRACE + 2.0)
    assert verdict(found, LIMIT, BYE_GRACE + 2.0) is None


def test_ranks_that_wait_for_different_things():
    found = members()
    found[2].hear({**found[2].beat, "waits_for": "all_gather of stop"}, 0.0)
    for time, tracing in ((DIFFERENT_GRACE - 1, None), (LIMIT, "train_step")):
        found[0].beat["tracing"] = tracing
        assert verdict(found, LIMIT, time) is None
    found[0].beat["tracing"] = None
    result = verdict(found, LIMIT, DIFFERENT_GRACE + 1)
    assert result.rank == 2
    assert "waits in all_gather of stop, while rank 0 waits in the exchange" in result.why


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"all_reduce of a": "float32 (3,)", "all_reduce of b": "float32 (1,)"}, "b is float32"),
        ({"all_reduce of a": "float32 (4,)"}, "a is float32 (4,) there, float32 (3,) on rank 0"),
        ({}, "a is missing there"),
    ],
)
def test_steps_that_exchange_different_things(own, message):
    found = members(collectives={"train_step": {"all_reduce of a": "float32 (3,)"}})
    found[1].collectives = {"train_step": own}
    for time, tracing in ((MISMATCH_GRACE - 1, False), (LIMIT, True), (LIMIT, False)):
        for member in found:
            member.hear({**member.beat, "collectives": None}, time)
        # A graph that is being traced is not fully known.
        found[2].beat["tracing"] = tracing
        result = verdict(found, LIMIT, time)
        assert (result is None) == (tracing or time < LIMIT)
    assert result.rank == 1
    assert message in result.why


def test_retraced_graph_replaces_the_previous_one():
    """Earlier exchanges of a rank, and unknown shapes, are not compared."""
    found = members(collectives={"train_step": {"all_reduce of a": "float32 (3,)"}})
    for member, shape in zip(found, ("(None, 4)", "(2, 4)", "(2, 4)"), strict=True):
        later = {"train_step": {"all_gather of b": f"float32 {shape}"}}
        member.hear({**member.beat, "collectives": later}, LIMIT)
    assert verdict(found, LIMIT, 2 * LIMIT) is None
    found[2].hear({**found[2].beat, "collectives": {"train_step": {}}}, LIMIT)
    assert "all_gather of b is missing there" in verdict(found, LIMIT, 2 * LIMIT).why


@pytest.mark.parametrize("waits_for", [None, "the exchange"])
def test_long_steps_are_no_mismatch(waits_for):
    """All wait for the same thing, or one does not wait at all."""
    found = members()
    found[2].hear({**found[2].beat, "waits_for": waits_for}, 0.0)
    for member in found:
        member.hear(member.beat, 10 * LIMIT)
    assert verdict(found, LIMIT, 10 * LIMIT) is None


def test_each_rank_notices_the_end_of_rank_0():
    rank_0, own, _ = members()
    assert verdict_of_rank_0(rank_0, own, LIMIT, 1.0) is None
    assert verdict_of_rank_0(rank_0, own, LIMIT, LIMIT + 1).rank == 0
    rank_0.lost = True
    assert verdict_of_rank_0(rank_0, own, LIMIT, 1.0).why == "died"


def test_uncaught_exception_keeps_the_call_it_left():
    found = members()
    found[1].hear(failure(call=1), 1.0)
    found[1].hear({**failure(call=None), "activity": "outside"}, 1.1)
    assert found[1].failure.activity == "fit, step 6"
    assert found[1].failure.call is None
