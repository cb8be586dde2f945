"""Checks which rank is named for what the ranks have begun and done."""

from tfdml.runtime.hang_report.exchange_log import Exchange
from tfdml.runtime.hang_report.first_difference import first_difference
from tfdml.runtime.hang_report.rank_report import GONE, RankReport

PLACE = "in on_batch_end at train.py:31"


def report(rank: int, text: str, place: str = PLACE, library: str = "") -> RankReport:
    """Returns a report of exchanges such as "a b+ c-": done, begun, failed."""
    turns: dict[str, int] = {}
    exchanges = []
    for begun, word in enumerate(text.split()):
        name = word.rstrip("+-")
        turns[name] = turns.get(name, 0) + 1
        done = None if word != name else begun + 0.5
        exchanges.append(Exchange(name, turns[name], begun, done, failed=word.endswith("-")))
    return RankReport(rank, "here", "fit, step 2", "", place, library, exchanges, turns)


def sentence(*reports: RankReport) -> str | None:
    difference = first_difference(reports)
    return difference and difference.sentence


def of(*texts: str) -> str | None:
    return sentence(*(report(rank, text) for rank, text in enumerate(texts)))


def test_the_rank_that_is_not_in_an_exchange_is_named():
    assert of("a b a+", "a b", "a b a+") == (
        "rank 1 never began a, in which ranks 0 and 2 wait; it is in on_batch_end at train.py:31"
    )


def test_a_rank_that_is_inside_a_library_is_named_with_both_places():
    assert sentence(report(0, "a a+"), report(1, "a", library="fit at keras/trainer.py:397")) == (
        f"rank 1 never began a, in which rank 0 waits; it is {PLACE}, inside fit at "
        f"keras/trainer.py:397"
    )
    assert "inside" not in sentence(report(0, "a a+", library="read at os.py:1"), report(1, "a"))


def test_of_several_exchanges_the_first_one_counts():
    assert of("a b c+ a+", "a b").startswith("rank 1 never began c, in which rank 0 waits")


def test_concurrent_exchanges_may_begin_in_any_order():
    assert of("a b c b+ a+ c+", "b a c a+ c+") == (
        "rank 1 never began b, in which rank 0 waits; it began a instead, " + PLACE
    )
    assert of("a b c b+ a+ c+", "b a c a b+ c+") == "rank 0 waits in a, which rank 1 ended"


def test_the_same_name_is_another_exchange_in_its_next_turn():
    assert of("a a a+", "a a").startswith("rank 1 never began a, in which rank 0 waits")
    assert of("a a a+", "a a a+") is None


def test_of_ranks_that_all_wait_the_odd_one_is_named():
    assert of("a+", "b+", "a+") == (
        "rank 1 never began a, in which ranks 0 and 2 wait; it began b instead, " + PLACE
    )
    assert of("b+", "a+", "a+").startswith("rank 0 never began a, in which ranks 1 and 2 wait")


def test_of_two_that_wait_the_one_is_named_that_departs_from_its_order():
    assert of("a b a b b+", "a b a b a+").startswith("rank 0 never began a, in which rank 1 waits")
    assert of("a b a b a+", "a b a b b+").startswith("rank 1 never began a, in which rank 0 waits")
    # Without an order before, the second one.
    assert of("a+", "b+").startswith("rank 1 never began a, in which rank 0 waits")


def test_of_ranks_that_wait_in_several_lines_both_are_named():
    saving, fitting = "in <module> at train.py:18", "in <module> at train.py:16"
    assert sentence(report(0, "a b+", saving), report(1, "a c+", fitting)) == (
        f"rank 1 never began b, in which rank 0 waits, {saving}; it began c instead, {fitting}"
    )


def test_a_rank_that_cannot_report_is_named_if_others_wait():
    gone = RankReport(1, "there", "fit, step 1", GONE)
    assert sentence(report(0, "a a+"), gone) == (
        'rank 1 has died, while rank 0 waits in a; it was last in "fit, step 1"'
    )
    assert sentence(report(0, "a a"), gone) is None


def test_nobody_is_named_while_nobody_waits():
    assert of("a b", "a b a") is None
    assert of("a a-", "a") is None  # It failed.
    assert of("a+", "a+") is None  # All are in it: it may be slow.


def test_many_ranks_are_counted():
    waiting = [report(rank, "a+") for rank in range(6)]
    assert "in which ranks 0, 1 and 4 others wait" in sentence(*waiting, report(6, ""))


def test_a_place_that_is_unknown_is_told_by_the_activity():
    assert sentence(report(0, "a+"), report(1, "", place="")).endswith('last in "fit, step 2"')
