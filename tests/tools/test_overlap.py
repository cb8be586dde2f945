"""Checks the benchmark that shows the overlap: how it reads Horovod's timeline."""

import json

import pytest

from tools.bench.overlap import Exchange, median_step, read_steps, record


def _events(tensor: int, name: str, at: list[tuple[int, int, int]]) -> list[dict]:
    """One tensor in a timeline: when it was ready, and its exchange began and ended, per step."""
    events = [{"name": "process_name", "ph": "M", "pid": tensor, "args": {"name": name}}]
    for ready, begin, end in at:
        events += [
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": ready, "pid": tensor},
            {"ph": "E", "ts": begin, "pid": tensor},
            {"ph": "B", "name": "ALLREDUCE", "ts": begin, "pid": tensor},
            {"ph": "E", "ts": end, "pid": tensor},
        ]
    return events


def test_a_timeline_becomes_steps(tmp_path):
    events = [
        *_events(1, "gradients.sgd.bucket_0_1of2", [(1000, 2000, 4000), (21000, 21500, 23000)]),
        *_events(2, "gradients.sgd.bucket_0_2of2", [(1500, 2000, 4000), (21100, 21500, 23000)]),
        *_events(3, "gradients.sgd.bucket_1_1of1", [(5000, 6000, 7000), (22000, 23000, 26000)]),
        *_events(4, "train_step.state.float32_1of1", [(8000, 8100, 8200), (27000, 27100, 27200)]),
    ]
    timeline = tmp_path / "timeline.json"
    timeline.write_text(json.dumps(events)[:-1] + ",\n")  # Horovod ends the file with a comma.
    steps = read_steps(timeline)
    assert steps == [
        [Exchange(0, 0.0, 1.0, 3.0), Exchange(1, 4.0, 5.0, 6.0)],
        [Exchange(0, 0.0, 0.5, 2.0), Exchange(1, 1.0, 2.0, 5.0)],
    ]
    assert median_step(steps) == steps[1]


@pytest.mark.slow
def test_a_recording_has_every_step_and_bucket(tmp_path):
    steps = record(tmp_path / "timeline.json")
    assert len(steps) == 12
    for step in steps:
        assert [e.bucket for e in step] == list(range(len(steps[0])))
        assert all(0 <= e.ready <= e.begin <= e.end for e in step)
    assert len(steps[0]) >= 5
