"""Runs `tfdml timeline` on files whose numbers are known."""

import json

import pytest

from tests.timeline.synthetic import rank_timeline, write


def test_it_shows_times_waits_and_gaps(tfdml_command, tmp_path):
    directory = write(tmp_path / "timeline")
    done = tfdml_command("timeline", str(directory), COLUMNS="120")
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "HorovodStrategy on 2 ranks, batches 4 to 5." in shown
    assert "aligned to within 0.400 ms" in shown
    cells = [line.replace("│", " ").replace("┃", " ").split() for line in shown.splitlines()]
    assert ["0", "host0", "100.00", "1.00", "50.00", "20.00", "9.00", "8.00"] in cells
    assert ["0", "host0", "28.00", "54%", "20.00", "17.00"] in cells
    assert ["10.00", "4", "0", "rank", "1", "g/bucket_0", "data", "wait"] in cells
    assert "Of all waiting in exchanges, it was for rank 1 100%." in shown
    assert ["16.00", "4", "g/bucket_0", "g/bucket_1", "rank", "1"] in cells
    trace = json.loads((directory / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M", "s", "f"}


def test_trace_and_picture_go_where_they_are_asked_to(tfdml_command, tmp_path):
    directory = write(tmp_path / "timeline")
    trace, picture = tmp_path / "trace.json", tmp_path / "step.png"
    options = ("--output", str(trace), "--picture", str(picture), "--longest", "1")
    done = tfdml_command("timeline", str(directory), *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (directory / "trace.json").exists()
    assert done.stdout.count("waited for") == 1
    assert done.stdout.count("g/bucket_1") <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "DIR must be a directory"),
        (["."], "must have the files of `tfdml.callbacks.Timeline`"),
        ([".", "--output", "no/where.json"], "`--output` must be in a directory that exists"),
    ],
)
def test_mistakes_are_explained(tfdml_command, arguments, message):
    done = tfdml_command("timeline", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_rank_is_named(tfdml_command, tmp_path):
    rank_timeline(1).save(tmp_path)
    done = tfdml_command("timeline", str(tmp_path))
    assert done.returncode == 1
    assert "without those of ranks [0]" in done.stderr
