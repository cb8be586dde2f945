"""Checks the merging of ranks' timelines: clocks, waits and their causes, and wrong files."""

import dataclasses

import pytest

from tests.timeline.synthetic import START, rank_timeline, write
from tfdml.timeline.job_timeline import JobTimeline
from tfdml.timeline.rank_timeline import Clock, Kind, RankTimeline, Span


def test_a_file_keeps_everything(tmp_path):
    timeline = rank_timeline(1, 3.0)
    assert RankTimeline.load(timeline.save(tmp_path)) == timeline


def test_clocks_are_aligned(tmp_path):
    job = JobTimeline.load(write(tmp_path))
    assert job.error == 0.0004
    wanted = JobTimeline([rank_timeline(0), rank_timeline(1)])
    for found, same in zip(job.ranks, wanted.ranks, strict=True):
        for one, other in zip(found.spans, same.spans, strict=True):
            assert one[:2] == other[:2]
            assert one[2:4] == pytest.approx(other[2:4], abs=1e-6)


def test_a_clock_that_runs_faster_is_followed():
    """The clock gains 20 ms in 100 s: far more than the measurements may be wrong."""
    clocks = [Clock(1000.0, -5.0, 0.001), Clock(1100.02, -5.02, 0.001)]
    spans = [Span(Kind.COMPUTE, "", 1000.0, 1050.01, 1)]
    fast = dataclasses.replace(rank_timeline(1), clocks=clocks, spans=spans)
    (span,) = JobTimeline([rank_timeline(0), fast]).ranks[1].spans
    assert (span.begin, span.end) == (pytest.approx(995.0), pytest.approx(1045.0))


def test_differences_within_the_errors_are_no_drift():
    clocks = [Clock(1000.0, -5.0, 0.0001), Clock(1000.1, -5.02, 0.05)]
    spans = [Span(Kind.COMPUTE, "", 1000.0, 1000.1, 1)]
    timeline = dataclasses.replace(rank_timeline(1), clocks=clocks, spans=spans)
    (span,) = JobTimeline([rank_timeline(0), timeline]).ranks[1].spans
    assert (span.begin, span.end) == (pytest.approx(995.0), pytest.approx(995.1))


def test_waits_have_their_rank_and_cause(tmp_path):
    job = JobTimeline.load(write(tmp_path))
    waits = job.waits()
    assert len(waits) == 4
    for wait in waits:
        assert (wait.rank, wait.last, job.cause(wait)) == (0, 1, "data wait")
        assert wait.seconds == pytest.approx(0.010, abs=1e-6)
    places = {(wait.exchange.step, wait.exchange.name) for wait in waits}
    assert places == {(step, f"g/bucket_{i}") for step in (4, 5) for i in (0, 1)}


def test_a_callback_of_the_last_rank_is_a_cause():
    late = rank_timeline(1)
    # Its data were there at once, but it saved until it took the next batch.
    spans = [
        s._replace(begin=START + 0.05, end=START + 0.107) if s.kind == Kind.CALLBACK else s
        for s in late.spans
        if s.kind != Kind.DATA
    ]
    job = JobTimeline([rank_timeline(0), dataclasses.replace(late, spans=spans)])
    causes = {job.cause(wait) for wait in job.waits() if wait.exchange.step == 5}
    assert causes == {"callback Saver.on_train_batch_end"}


def test_exchanges_of_subgroups_are_apart():
    """Under one name, each host's ranks exchange among themselves."""
    timelines = []
    for rank, begin in enumerate((1.0, 2.0, 5.0, 6.0)):
        ranks = [0, 1] if rank < 2 else [2, 3]
        span = Span(Kind.EXCHANGE, "within", begin, 7.0, 1, {"ranks": ranks})
        timelines.append(RankTimeline(rank, 4, "host", "job", "HorovodStrategy", [], [span]))
    waits = JobTimeline(timelines).waits()
    assert {(w.rank, w.last, w.seconds) for w in waits} == {(0, 1, 1.0), (2, 3, 1.0)}


def test_an_exchange_that_ends_before_all_took_part_is_cut():
    """Clocks may be wrong by a little: no wait is longer than the exchange."""
    spans = (Span(Kind.EXCHANGE, "x", begin, end, 1) for begin, end in ((1.0, 1.5), (1.501, 1.502)))
    timelines = [
        RankTimeline(rank, 2, "host", "job", "HorovodStrategy", [], [span])
        for rank, span in enumerate(spans)
    ]
    (wait,) = JobTimeline(timelines).waits()
    assert wait.seconds == 0.5


def test_wrong_directories_are_explained(tmp_path):
    with pytest.raises(ValueError, match="must have the files of `tfdml.callbacks.Timeline`"):
        JobTimeline.load(tmp_path)
    rank_timeline(1).save(tmp_path)
    with pytest.raises(ValueError, match=r"a file of each of the 2 ranks.*without.*\[0\]"):
        JobTimeline.load(tmp_path)
    rank_timeline(0, job="another").save(tmp_path)
    with pytest.raises(ValueError, match="must be of one job"):
        JobTimeline.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "cannot be read as one"),
        ("[]", "cannot be read as one"),
        ('{"format": 1, "rank": 0}', "cannot be read as one"),
        ('{"format": 2}', "must have format 1. Received: format 2"),
    ],
)
def test_wrong_files_are_explained(tmp_path, text, message):
    (tmp_path / "rank-0000.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        JobTimeline.load(tmp_path)
