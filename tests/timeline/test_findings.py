"""Checks what a timeline tells, by numbers worked out by hand, and the trace's form."""

import itertools

import pytest

from tests.timeline.synthetic import rank_timeline, write
from tfdml.timeline.chrome_trace import chrome_trace
from tfdml.timeline.findings import find
from tfdml.timeline.intervals import common, total, union
from tfdml.timeline.job_timeline import JobTimeline
from tfdml.timeline.lanes import lanes_of
from tfdml.timeline.rank_timeline import Kind, RankTimeline, Span


@pytest.fixture
def job(tmp_path) -> JobTimeline:
    """Returns the timelines of two ranks, whose clocks differ."""
    return JobTimeline.load(write(tmp_path))


def test_times_of_a_step(job):
    found = find(job)
    assert found.steps == [4, 5]
    first, second = found.ranks
    ms = lambda value: pytest.approx(value / 1000, abs=1e-6)  # noqa: E731
    assert (first.step, second.step) == (ms(100), ms(100))
    assert (first.data, second.data) == (ms(1), ms(11))
    assert (first.compute, first.rest, first.update) == (ms(50), ms(20), ms(9))
    assert (second.compute, second.rest, second.update) == (ms(50), ms(10), ms(9))
    assert (first.between, second.between) == (ms(8), ms(8))
    # From 30 to 45, 61 to 71 and 72 to 75; the first of them while both ranks computed.
    assert (first.wire, second.wire) == (ms(28), ms(28))
    assert (first.hidden, second.hidden) == (ms(15), ms(15))
    assert first.overlap == pytest.approx(15 / 28, abs=1e-4)
    # From 20 to 30 and from 51 to 61, with nothing on the wire.
    assert (first.waited, second.waited) == (ms(20), ms(0))
    # From 45 to 61 and from 71 to 72.
    assert (first.idle, second.idle) == (ms(17), ms(17))
    assert found.caused == {1: ms(40)}


def test_gaps_say_between_what(job):
    longest, *_, shortest = find(job).gaps
    assert (longest.after.name, longest.before.name) == ("g/bucket_0", "g/bucket_1")
    assert longest.last == 1
    assert longest.seconds == pytest.approx(0.016, abs=1e-6)
    assert shortest.after.name == "g/bucket_1"
    assert shortest.before.name == "train_step/state/float32"
    assert len(find(job).gaps) == 4


def test_without_exchange_there_is_no_overlap():
    spans = [Span(Kind.COMPUTE, "", 1.0, 2.0, 1)]
    (rank,) = find(
        JobTimeline([RankTimeline(0, 1, "host", "job", "HorovodStrategy", [], spans)])
    ).ranks
    assert rank.overlap is None
    assert rank.step == 1.0


def test_a_slow_step_counts_in_all_means():
    """Steps of 1, 1 and 4 s, of which 0.5, 0.5 and 3.5 s are a wait for data."""
    times = [(0.0, 0.5), (1.0, 1.5), (2.0, 5.5), (6.0, 6.5)]
    spans = [
        Span(kind, "", begin, end, step)
        for step, (first, then) in enumerate(times)
        for kind, begin, end in ((Kind.DATA, first, then), (Kind.COMPUTE, then, then + 0.5))
    ]
    timeline = RankTimeline(0, 1, "host", "job", "HorovodStrategy", [], spans)
    (rank,) = find(JobTimeline([timeline])).ranks
    assert rank.step == pytest.approx(2.0)  # From 0.5 to 1.5, to 5.5, to 6.5.
    assert rank.data == pytest.approx(1.25)


def test_exchanges_that_overlap_count_once():
    assert union([(3, 4), (1, 2.5), (2, 3), (5, 5)]) == [(1, 4)]
    assert total([(1, 4), (6, 7)]) == 4
    assert common([(1, 4), (6, 8)], [(0, 2), (3, 7)]) == 3


# -- The trace -------------------------------------------------------------------------------------


def events(job: JobTimeline, phase: str) -> list[dict]:
    return [event for event in chrome_trace(job)["traceEvents"] if event["ph"] == phase]


def test_the_trace_has_every_span_and_wait(job):
    found = events(job, "X")
    assert len(found) == sum(len(t.spans) for t in job.ranks) + len(job.waits())
    assert min(event["ts"] for event in found) == 0
    for event in found:
        assert event["dur"] >= 0
        assert {"name", "cat", "pid", "tid", "ts", "args"} <= event.keys()
    waits = [event for event in found if event["cat"] == "waiting"]
    assert {(e["pid"], e["name"], e["dur"]) for e in waits} == {
        (1000, "waiting for rank 1", 10_000)
    }
    reduce = next(e for e in found if e["name"] == "g/bucket_0")
    assert reduce["args"] == {
        "name": "g/bucket_0", "batch": 4, "operation": "all_reduce", "bytes": 4096
    }  # fmt: skip


def test_slices_of_a_thread_are_within_each_other_or_apart(job):
    """Viewers draw nothing else; exchanges of rank 0 that overlap have threads of their own."""
    by_thread = itertools.groupby(
        sorted(events(job, "X"), key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"])),
        key=lambda e: (e["pid"], e["tid"]),
    )
    for _, slices in by_thread:
        open_until: list[float] = []
        for event in slices:
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_arrows_lead_from_the_last_rank_to_the_others(job):
    begins, ends = events(job, "s"), events(job, "f")
    assert len(begins) == len(ends) == 6
    slices = [e for e in events(job, "X") if e["cat"] == Kind.EXCHANGE]
    for begin, end in zip(begins, ends, strict=True):
        assert begin["id"] == end["id"]
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert end["bp"] == "e"
        assert begin["ts"] <= end["ts"]
        assert begin["pid"] != end["pid"]
        for event in (begin, end):
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
                and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
                and s["args"]["name"] == event["name"]
            ]
            assert around
    # Rank 1 was last, but for the small message, in which both took part at once.
    buckets = [b for b in begins if "bucket" in b["name"]]
    assert {b["pid"] for b in buckets} == {2000}


def test_processes_and_threads_have_names(job):
    names = {
        (e["pid"], e["tid"], e["args"]["name"]) for e in events(job, "M") if "name" in e["args"]
    }
    assert (1000, 1000, "rank 0 (host0)") in names
    assert (2000, 2000, "steps") in names
    assert (2000, 2002, "exchanges 1") in names
    threads = [tid for _, tid, name in names if not name.startswith("rank")]
    assert len(set(threads)) == len(threads)


def test_overlapping_buckets_have_lanes_and_codecs_stay_with_theirs():
    spans = []
    for number, begin in enumerate((1.0, 2.0, 6.0)):
        bucket = f"g/compressed_{number}"
        spans += [
            Span(Kind.ENCODE, bucket, begin, begin + 1, 1),
            Span(Kind.EXCHANGE, f"{bucket}/to_owner", begin + 1, begin + 2, 1),
            Span(Kind.ADD, bucket, begin + 2, begin + 3, 1),
            Span(Kind.EXCHANGE, f"{bucket}/to_all", begin + 3, begin + 3.5, 1),
            Span(Kind.DECODE, bucket, begin + 3.5, begin + 4, 1),
        ]
    first, second = lanes_of(RankTimeline(0, 1, "h", "j", "HorovodStrategy", [], spans))
    assert {span.name.split("/")[1] for span in first} == {"compressed_0", "compressed_2"}
    assert {span.name.split("/")[1] for span in second} == {"compressed_1"}
    assert (len(first), len(second)) == (10, 5)


def test_a_rank_without_a_clock_is_left_as_it_is():
    timeline = rank_timeline(0)
    timeline.clocks = []
    assert JobTimeline([timeline]).ranks[0].spans == timeline.spans
