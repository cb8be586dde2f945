"""Records real ranks: the same bits, every span in its place, clocks aligned, causes found."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.callbacks import timeline_cases as cases
from tfdml.callbacks import Timeline
from tfdml.timeline.findings import find
from tfdml.timeline.job_timeline import JobTimeline
from tfdml.timeline.rank_timeline import Kind, RankTimeline

LOOP = {Kind.DATA, Kind.COMPUTE, Kind.REST, Kind.UPDATE}
PLAIN = {f"gradients/sgd/bucket_{i}" for i in range(3)}
CODED = {f"gradients/sgd/compressed_{i}/{way}" for i in range(3) for way in ("to_owner", "to_all")}


def recorded(directory: Path, size: int = 2) -> JobTimeline:
    assert sorted(f.name for f in directory.iterdir()) == [
        f"rank-{i:04d}.json" for i in range(size)
    ]
    return JobTimeline.load(directory)


def trained(ranks, directory: Path | None, kind: str = "horovod", **settings) -> list:
    """Trains on two ranks; see `cases.train`."""
    settings["directory"] = None if directory is None else str(directory)
    return ranks(2, kind).run(cases.train_with, settings)


def steps(timeline: RankTimeline, *kinds: str) -> list[int]:
    return sorted({s.step for s in timeline.spans if s.kind in kinds})


def check_causality(job: JobTimeline) -> None:
    """No rank can have the result of an exchange before the last one took part."""
    checked = 0
    for span in job.ranks[0].spans:
        if span.kind == Kind.EXCHANGE:
            parts = job.parts(span)
            assert len(parts) == len(job.ranks)
            _, last = job.last(span)
            for part in parts.values():
                assert last <= part.end + 2 * job.error + 1e-5
            checked += 1
    assert checked


@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        ("horovod", None),
        ("multi_worker", "int8"),
        pytest.param("horovod", "int8", marks=pytest.mark.slow),
        pytest.param("horovod", "powersgd", marks=pytest.mark.slow),
        pytest.param("multi_worker", None, marks=pytest.mark.slow),
    ],
)
def test_steps_are_recorded_and_compute_the_same(ranks, tmp_path, kind, compression):
    """Rank 1's clock is far ahead, so that without alignment nothing would fit."""
    ahead = 7.25
    options = {"compression": compression}
    weights = trained(ranks, tmp_path / "t", kind, shift=ahead, **options)
    (wanted, _) = trained(ranks, None, kind, **options)
    for own in weights:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(own, wanted, strict=True))
    raw = [RankTimeline.load(tmp_path / "t" / f"rank-{i:04d}.json") for i in range(2)]
    assert raw[1].spans[0].begin - raw[0].spans[0].begin > ahead - 2
    job = recorded(tmp_path / "t")
    assert 0 < job.error < 2
    check_causality(job)
    for timeline in job.ranks:
        for one in LOOP:
            assert steps(timeline, one) == [4, 5, 6]
        names = {s.name for s in timeline.spans if s.kind == Kind.EXCHANGE}
        if compression is None:
            assert names >= PLAIN
        elif compression == "int8":
            assert names >= CODED
        for own in timeline.spans:
            assert own.end >= own.begin
        check_order_of_a_step(timeline, compression)


def check_order_of_a_step(timeline: RankTimeline, compression: str | None) -> None:
    """A step's spans follow each other, and its exchanges lie within it."""
    for step in (4, 5, 6):
        own = {s.kind: s for s in timeline.spans if s.step == step and s.kind in LOOP}
        chain = [own[k] for k in (Kind.DATA, Kind.COMPUTE, Kind.REST, Kind.UPDATE)]
        for before, after in zip(chain, chain[1:], strict=False):
            assert before.end == after.begin
        exchanges = [s for s in timeline.spans if s.step == step and s.kind == Kind.EXCHANGE]
        gradients = [s for s in exchanges if s.name.startswith("gradients/")]
        assert all(own[Kind.COMPUTE].begin <= s.begin for s in exchanges)
        assert all(s.end <= own[Kind.UPDATE].end for s in exchanges)
        assert all(s.end <= own[Kind.REST].end for s in gradients)
        coded = Counter(s.kind for s in timeline.spans if s.step == step)
        if compression is not None:
            assert coded[Kind.ENCODE] == coded[Kind.DECODE] > 0
        else:
            assert not coded[Kind.ENCODE]


def test_a_late_rank_is_named_with_its_callback(ranks, tmp_path):
    trained(ranks, tmp_path / "t", extra="late", shift=-4.0)
    job = recorded(tmp_path / "t")
    found = find(job)
    longest = [wait for wait in found.waits if wait.seconds > 0.35]
    assert longest
    for wait in longest:
        assert (wait.rank, wait.last) == (0, 1)
        assert job.cause(wait) == "callback Late.on_train_batch_end"
    assert found.caused[1] > found.caused.get(0, 0.0)


def test_a_busy_rank_is_aligned(ranks, tmp_path):
    trained(ranks, tmp_path / "t", extra="busy", shift=5.0)
    check_causality(recorded(tmp_path / "t"))


def test_only_the_chosen_steps_have_another_graph(ranks, tmp_path):
    for graphs in ranks(2).run(cases.traced, {"directory": str(tmp_path / "t")}):
        assert graphs == [False, True]


def test_nothing_is_recorded_after_a_failure(ranks, tmp_path):
    for graphs in ranks(2).run(cases.failing_then_training, str(tmp_path / "t")):
        assert graphs == [False]
    assert not (tmp_path / "t").exists()


def test_several_steps_per_execution(ranks, tmp_path):
    """Whole executions are recorded: of batches 3 and 4, and of 5 and 6."""
    compiling = {"steps_per_execution": 2}
    own = trained(ranks, tmp_path / "t", profile_batch=(4, 5), compiling=compiling)
    (wanted, _) = trained(ranks, None, compiling=compiling)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(own[0], wanted, strict=True))
    for timeline in recorded(tmp_path / "t").ranks:
        assert steps(timeline, Kind.COMPUTE) == steps(timeline, Kind.EXCHANGE) == [3, 4, 5, 6]
        assert steps(timeline, Kind.DATA) == [3, 5]


def test_accumulated_gradients_are_exchanged_in_some_steps(ranks, tmp_path):
    optimizer = {"gradient_accumulation_steps": 2}
    own = trained(ranks, tmp_path / "t", profile_batch=(3, 6), optimizer=optimizer)
    (wanted, _) = trained(ranks, None, optimizer=optimizer)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(own[0], wanted, strict=True))
    for timeline in recorded(tmp_path / "t").ranks:
        assert steps(timeline, Kind.COMPUTE) == [3, 4, 5, 6]
        buckets = {s.step for s in timeline.spans if "bucket" in s.name}
        assert buckets == {4, 6}


def test_saves_and_their_writes(ranks, tmp_path):
    trained(ranks, tmp_path / "t", extra="saving")
    for timeline in recorded(tmp_path / "t").ranks:
        found = {k: [s for s in timeline.spans if s.kind == k] for k in vars(Kind).values()}
        assert len(found[Kind.SAVE]) >= 2
        assert len(found[Kind.WRITE]) >= 2
        for save in found[Kind.SAVE]:
            assert save.name.startswith("fit-000-epoch-0000-step-")
            around = [c for c in found[Kind.CALLBACK] if c.begin <= save.begin <= save.end <= c.end]
            assert [c.name for c in around] == ["FaultTolerantCheckpoint.on_train_batch_end"]
    # A restart may leave the timeline out.
    manifests = [file.read_text() for file in tmp_path.glob("t-saves/*/checkpoint.json")]
    assert manifests
    assert not any("Timeline" in text for text in manifests)


def test_a_validation_is_a_call_and_its_steps_are_not_recorded(ranks, tmp_path):
    """A file is there at the end, though the chosen steps begin in one epoch and end in another."""
    assert ranks(2).run(cases.evaluating, str(tmp_path / "t")) == [2, 2]
    for timeline in recorded(tmp_path / "t").ranks:
        assert steps(timeline, Kind.COMPUTE) == [3, 4, 5, 6]
        (call,) = [s for s in timeline.spans if s.kind == Kind.CALL]
        assert call.name == "evaluate"
        assert not {s.name for s in timeline.spans if "test_step" in s.name}


@pytest.mark.parametrize(
    ("profile_batch", "wanted"), [((1, 2), [1, 2]), (8, [8]), ((7, 100), [7, 8]), ((9, 12), [])]
)
@pytest.mark.slow
def test_ends_of_a_fit(ranks, tmp_path, profile_batch, wanted):
    trained(ranks, tmp_path / "t", profile_batch=profile_batch)
    if not wanted:
        assert not (tmp_path / "t").exists()
        return
    for timeline in recorded(tmp_path / "t").ranks:
        assert steps(timeline, Kind.COMPUTE) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ("generator", {}),
        ("sharded", {}),
        ("sharded", {"compression": "int8"}),
        ("", {"compiling": {"jit_compile": True}}),
        ("", {"compiling": {"run_eagerly": True}}),
        ("", {"devices": 2}),
    ],
)
def test_other_trainings_compute_the_same(ranks, tmp_path, extra, options):
    own = trained(ranks, tmp_path / "t", extra=extra, **options)
    (wanted, _) = trained(ranks, None, extra=extra, **options)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(own[0], wanted, strict=True))
    job = recorded(tmp_path / "t")
    check_causality(job)
    for timeline in job.ranks:
        assert steps(timeline, Kind.COMPUTE) == steps(timeline, Kind.EXCHANGE) == [4, 5, 6]


def test_synchronizations_are_traced_before_the_chosen_steps_and_again_after(ranks, tmp_path):
    """Those of steps 6 and 9 are recorded, in the graph that that of step 3 has traced."""
    settings = {"directory": str(tmp_path / "t"), "profile_batch": (5, 10), "steps": 12}
    for graphs in ranks(2).run(cases.traced_synchronizations, {**settings, "extra": "LocalSGD"}):
        assert graphs == [(True, 3), (False, 12)]


@pytest.mark.slow
def test_buckets_of_a_group_of_devices(ranks, tmp_path):
    settings = {"extra": "ring", "devices": 2}
    own = trained(ranks, tmp_path / "t", "multi_worker", **settings)
    (wanted, _) = trained(ranks, None, "multi_worker", **settings)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(own[0], wanted, strict=True))
    job = recorded(tmp_path / "t")
    check_causality(job)
    for timeline in job.ranks:
        exchanges = [s for s in timeline.spans if s.kind == Kind.EXCHANGE]
        assert {s.name for s in exchanges} >= PLAIN
        assert {s.details["operation"] for s in exchanges if s.name in PLAIN} == {"all_reduce"}


def test_one_process_says_that_there_is_nothing(ranks, tmp_path):
    (said,) = ranks(1).run(cases.said_on_one_process, str(tmp_path / "t"))
    assert "one process exchanges nothing" in said
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("extra", "first", "synchronized"),
    [("LocalSGD", 5, [6, 9]), pytest.param("DiLoCo", 5, [6, 8, 10], marks=pytest.mark.slow)],
)
def test_synchronizations_of_local_updates(ranks, tmp_path, extra, first, synchronized):
    """Steps exchange nothing; a synchronization is recorded with the step before it."""
    settings = {"steps": 12, "extra": extra}
    own = trained(ranks, tmp_path / "t", profile_batch=(first, 10), shift=3.0, **settings)
    (wanted, _) = trained(ranks, None, **settings)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(own[0], wanted, strict=True))
    job = recorded(tmp_path / "t")
    check_causality(job)
    for timeline in job.ranks:
        assert steps(timeline, Kind.COMPUTE) == steps(timeline, Kind.UPDATE) == [*range(first, 11)]
        assert steps(timeline, Kind.EXCHANGE) == synchronized
        rests = [s for s in timeline.spans if s.name == "synchronization"]
        assert len(rests) == len(synchronized)
        for rest, step in zip(rests, synchronized, strict=True):
            (update,) = [s for s in timeline.spans if (s.kind, s.step) == (Kind.UPDATE, step)]
            assert update.end == rest.begin
            exchanges = [s for s in timeline.spans if (s.kind, s.step) == (Kind.EXCHANGE, step)]
            assert any("bucket" in s.name for s in exchanges)
            assert all(rest.begin <= s.begin <= s.end <= rest.end for s in exchanges)


def test_parameter_servers_are_refused(cluster):
    with pytest.raises(AssertionError, match="Received: a ParameterServerStrategy. Leave the"):
        cluster.run(cases.on_servers)


def test_models_without_a_strategy_are_refused():
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="in the scope of a synchronous strategy of tfdml"):
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[Timeline("nowhere")])


@pytest.mark.parametrize("profile_batch", [(0, 5), (5, 4), (1,), (1, 2, 3), (1.0, 2), "12", 0])
def test_wrong_batches_are_refused(profile_batch):
    with pytest.raises(ValueError, match="`profile_batch` must be the numbers of the first"):
        Timeline("nowhere", profile_batch)
