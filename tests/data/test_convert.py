"""Checks conversions: the same bytes from any number of processes, complete after interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tfdml.data.check.verification import verify
from tfdml.data.format import example
from tfdml.data.format import manifest as manifests
from tfdml.data.format.schema import Schema
from tfdml.data.sources.opening import open_source
from tfdml.data.sources.tfrecords import TfrecordSource
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions, ConversionPlan
from tfdml.topology import child_environment

ROOT = Path(__file__).resolve().parents[2]


def table(path: Path, rows: int) -> str:
    lines = [f'{i},{i / 7:.3f},"text, {i}\n{"x" * (i % 50)}"' for i in range(rows)]
    path.write_text("id,value,text\n" + "\n".join(lines) + "\n")
    return str(path)


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def rows_of(directory: Path, split: str = "train") -> list[dict]:
    manifest = manifests.load(str(directory))
    source = TfrecordSource([manifest.path_of(s) for s in manifest.shards(split)], manifest.schema)
    return [row.values for chunk in source.chunks() for row in source.rows(chunk.key)]


MODES = {
    "in order": ConversionOptions(shards=5),
    "shuffled": ConversionOptions(shards=5, shuffle_seed=3),
    "splits": ConversionOptions(shards=5, splits=(("train", 0.8), ("test", 0.2)), split_key="text"),
    "gzip": ConversionOptions(shards=3, compressed=True),
}


@pytest.mark.parametrize("mode", ["in order", "shuffled", "gzip"])
def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path, mode):
    source = open_source([table(tmp_path / "a.csv", 3000)])
    for processes in (1, 2):
        convert(source, str(tmp_path / str(processes)), MODES[mode], processes=processes)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert len(contents(tmp_path / "1")) >= 7


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_written_once(tmp_path, mode):
    source = open_source([table(tmp_path / "a.csv", 3000)])
    manifest = convert(source, str(tmp_path / "out"), MODES[mode])
    rows = [row for split in manifest.splits for row in rows_of(tmp_path / "out", split)]
    ids = [int(row["id"]) for row in rows]
    assert sorted(ids) == list(range(3000))
    assert all(r["text"] == f"text, {r['id']}\n{'x' * (r['id'] % 50)}".encode() for r in rows)
    if mode == "shuffled":
        assert abs(np.corrcoef(ids, np.arange(3000))[0, 1]) < 0.1
        counts = [shard.records for shard in manifest.splits["train"]]
        assert counts == [600] * 5
    elif mode != "splits":
        assert ids == list(range(3000))
    assert verify(str(tmp_path / "out")).sound


@pytest.mark.parametrize("key", ["text", None])
def test_splits_are_stable_when_data_are_added(tmp_path, key):
    members = []
    for rows in (2000, 3000):
        source = open_source([table(tmp_path / f"{rows}.csv", rows)])
        options = ConversionOptions(splits=(("train", 0.8), ("test", 0.2)), split_key=key)
        convert(source, str(tmp_path / f"out{rows}"), options)
        members.append({int(r["id"]) for r in rows_of(tmp_path / f"out{rows}", "test")})
    assert members[0] == {i for i in members[1] if i < 2000}
    assert 0.15 < len(members[0]) / 2000 < 0.25


COMMAND = [sys.executable, "-m", "tfdml.cli.main", "records", "convert"]


# Time for a conversion to begin on a loaded machine.
START_SECONDS = 180


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=child_environment(PYTHONPATH=str(ROOT)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("how", "shuffle"),
    [
        (signal.SIGKILL, []),
        pytest.param(signal.SIGKILL, ["--shuffle", "1"], marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, [], marks=pytest.mark.slow),
    ],
)
def test_resume_after_a_kill(tmp_path, how, shuffle):
    path = table(tmp_path / "a.csv", 60_000)
    arguments = [path, "--shards", "12", "--processes", "2", *shuffle]
    whole = start(*arguments, "-o", str(tmp_path / "whole"))
    output = tmp_path / "killed"
    killed = start(*arguments, "-o", str(output))
    work = output / ".data.converting"
    deadline = time.monotonic() + START_SECONDS
    while not list(work.glob("*-00000*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(how)
    _, error = killed.communicate(timeout=120)
    assert killed.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130), error
    assert not (output / "data.manifest.json").exists()
    # A file under its final name is complete.
    finished = {p.name: p.read_bytes() for p in output.glob("*.tfrecord")}
    refused = start(*arguments, "-o", str(output))
    assert "Continue it with --resume" in refused.communicate(timeout=120)[1]
    resumed = start(*arguments, "-o", str(output), "--resume")
    stdout, error = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, error
    assert "60000 in = 60000 written + 0 rejected" in stdout
    assert whole.wait(timeout=120) == 0
    assert contents(output) == contents(tmp_path / "whole")
    assert all((output / name).read_bytes() == data for name, data in finished.items())


LIMITED = """
import resource, runpy, signal, sys
# Files end there, as on a disk that is full.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.argv = ["tfdml", "records", "convert", *sys.argv[1:]]
runpy.run_module("tfdml.cli.main", run_name="__main__")
"""


def test_resume_after_a_write_that_failed(tmp_path):
    path = tmp_path / "a.jsonl"
    # The last of 4 shards does not fit.
    lines = [json.dumps({"id": i, "text": "x" * (10 if i < 750 else 900)}) for i in range(1000)]
    path.write_text("\n".join(lines))
    arguments = [str(path), "-o", str(tmp_path / "out"), "--shards", "4", "--processes", "1"]
    failed = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        env=child_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert failed.returncode == 1
    assert "tfdml records convert: " in failed.stderr
    assert "File too large" in failed.stderr
    assert "Traceback" not in failed.stderr
    shards = sorted(p.name for p in (tmp_path / "out").glob("*.tfrecord"))
    assert len(shards) == 3
    assert not list((tmp_path / "out").glob("*.partial"))
    convert(
        open_source([str(path)]), str(tmp_path / "out"), ConversionOptions(shards=4), resume=True
    )
    assert verify(str(tmp_path / "out")).records == 1000
    assert [int(r["id"]) for r in rows_of(tmp_path / "out")] == list(range(1000))


def test_one_process_is_enough_for_little_input(tmp_path, monkeypatch):
    def pool(*_):
        raise AssertionError("a second process")

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", pool)
    source = open_source([table(tmp_path / "a.csv", 100)])
    convert(source, str(tmp_path / "out"), ConversionOptions())
    monkeypatch.setattr("tfdml.data.write.convert.PROCESS_BYTES", 100)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(AssertionError, match="a second process"):
        convert(source, str(tmp_path / "two"), ConversionOptions())


PEAK = """
import resource, sys
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions
from tfdml.data.sources.opening import open_source
options = ConversionOptions(shard_bytes=4 << 20, shuffle_seed=int(sys.argv[3]) or None)
convert(open_source([sys.argv[1]]), sys.argv[2], options, processes=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [0, 1])
def test_memory_does_not_grow_with_the_input(tmp_path, shuffle):
    peaks = []
    for megabytes in (40, 160):
        path = tmp_path / f"{megabytes}.csv"
        with path.open("w") as file:
            file.write("id,text\n")
            file.writelines(f"{i},{'x' * 1000}{i}\n" for i in range(1000 * megabytes))
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                PEAK,
                str(path),
                str(tmp_path / f"out{megabytes}"),
                str(shuffle),
            ],
            env=child_environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    # A quarter of 120 MB more input: the memory kept by malloc differs from run to run.
    assert peaks[1] - peaks[0] < 30, peaks


def test_a_second_converter_is_refused(tmp_path):
    path = table(tmp_path / "a.csv", 60_000)
    output = str(tmp_path / "out")
    first = start(path, "-o", output, "--processes", "1", "--shards", "4")
    deadline = time.monotonic() + START_SECONDS
    while not Path(output, ".data.converting", "plan.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ValueError, match="`output` must be written by one conversion at a time"):
        convert(open_source([path]), output, ConversionOptions(shards=4), resume=True)
    assert first.wait(timeout=120) == 0, first.stderr.read()
    assert verify(output).sound


def test_resume_with_another_input_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    source = open_source([table(path, 100)])
    with monkeypatch.context() as patched:
        # As if the process ended after its first steps.
        patched.setattr("tfdml.data.write.checks.check_unchanged", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(source, str(tmp_path / "out"), ConversionOptions(shards=4))
    time.sleep(0.01)
    table(path, 101)
    with pytest.raises(ValueError, match="must be used with the same input"):
        convert(
            open_source([str(path)]),
            str(tmp_path / "out"),
            ConversionOptions(shards=4),
            resume=True,
        )
    convert(
        open_source([str(path)]), str(tmp_path / "out"), ConversionOptions(shards=4), overwrite=True
    )
    assert len(rows_of(tmp_path / "out")) == 101


def _interrupt(*_):
    raise KeyboardInterrupt


def test_input_that_changes_during_conversion_is_detected(tmp_path):
    path = tmp_path / "a.csv"
    source = open_source([table(path, 3000)])

    def change(done, total):
        path.write_text(path.read_text().replace("text, 7\n", "Text, 7\n"))
        os.utime(path, ns=(1, 1))

    with pytest.raises(ValueError, match="The input must not change while it is converted"):
        convert(source, str(tmp_path / "out"), ConversionOptions(shards=4), progress=change)
    assert not list((tmp_path / "out").glob("*.manifest.json"))


def test_rejects_are_counted_and_written_down(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"a": i}) if i % 10 else '{"a": "no"}' for i in range(1, 101)]
    path.write_text("\n".join(lines))
    source = open_source([str(path)], schema=Schema.from_json({"a": "int64"}))
    with pytest.raises(ValueError, match=r"a.jsonl, row 10: 'a' must be an integer. Received: 'no"):
        convert(source, str(tmp_path / "strict"), ConversionOptions())
    with pytest.raises(ValueError, match="At most 9 rows may be skipped"):
        convert(source, str(tmp_path / "few"), ConversionOptions(on_error="skip", max_errors=9))
    manifest = convert(
        source, str(tmp_path / "out"), ConversionOptions(on_error="skip", max_errors=10)
    )
    assert manifest.counts == {"in": 100, "written": 90, "rejected": 10, "skipped": 0}
    rejects = (tmp_path / "out" / "data.rejects.jsonl").read_text().splitlines()
    assert len(rejects) == 10
    assert json.loads(rejects[0])["where"].endswith("a.jsonl, row 10")


def test_full_disk_is_reported(tmp_path, monkeypatch):
    source = open_source([table(tmp_path / "a.csv", 1000)])
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage)
    with pytest.raises(ValueError, match="`output` must have room for about"):
        convert(source, str(tmp_path / "out"), ConversionOptions())


class _Usage:
    free = 10


def test_wrong_outputs_are_refused(tmp_path):
    path = table(tmp_path / "a.csv", 10)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="`output` must be empty"):
        convert(open_source([path]), str(tmp_path / "full"), ConversionOptions())
    with pytest.raises(ValueError, match="`shards` must be at most the number of records"):
        convert(open_source([path]), str(tmp_path / "out"), ConversionOptions(shards=11))
    with pytest.raises(ValueError, match="`resume` must be given only for an interrupted"):
        convert(open_source([path]), str(tmp_path / "new"), ConversionOptions(), resume=True)


def test_the_plan_reads_each_row_once(tmp_path):
    source = open_source([table(tmp_path / "a.csv", 1000)])
    plan = ConversionPlan(source, ConversionOptions(shards=7))
    assert [r.begin for r in plan.ranges[1:]] == [r.end for r in plan.ranges[:-1]]
    rows = [
        row.values["id"]
        for part in plan.ranges
        for chunk, begin, end in plan.chunks_of(part)
        for row in source.read(chunk, begin, end)
    ]
    assert rows == list(range(1000))


def test_examples_are_those_of_protocol_buffers():
    """Golden bytes, written by TensorFlow's own classes."""
    import tensorflow as tf

    values = {
        "a": example.one_int64(-5),
        "bé": example.int64_list(np.array([0, 127, 128, 2**63 - 1, -(2**63)])),
        "c": example.float_list(np.array([1.5, -2.0], np.float32)),
        "d": example.bytes_list([b"", b"xyz" * 100]),
        "e": example.int64_list(np.array([], np.int64)),
    }
    encode = example.encoder([(name, name, lambda v: v) for name in values])
    feature = {
        "a": tf.train.Feature(int64_list=tf.train.Int64List(value=[-5])),
        "bé": tf.train.Feature(
            int64_list=tf.train.Int64List(value=[0, 127, 128, 2**63 - 1, -(2**63)])
        ),
        "c": tf.train.Feature(float_list=tf.train.FloatList(value=[1.5, -2.0])),
        "d": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"", b"xyz" * 100])),
        "e": tf.train.Feature(int64_list=tf.train.Int64List()),
    }
    theirs = tf.train.Example(features=tf.train.Features(feature=feature))
    ours = tf.train.Example.FromString(encode(values))
    assert ours == theirs
    decoded = example.decode(theirs.SerializeToString())
    assert decoded["bé"].tolist() == [0, 127, 128, 2**63 - 1, -(2**63)]
    assert decoded["d"] == [b"", b"xyz" * 100]


def test_tensorflow_reads_the_files(tmp_path):
    import tensorflow as tf

    source = open_source([table(tmp_path / "a.csv", 500)])
    for compressed in (False, True):
        output = tmp_path / f"out{compressed}"
        manifest = convert(source, str(output), ConversionOptions(shards=2, compressed=compressed))
        paths = [manifest.path_of(s) for s in manifest.splits["train"]]
        kind = "GZIP" if compressed else ""
        records = list(tf.data.TFRecordDataset(paths, kind))
        parsed = tf.io.parse_example(records, {"id": tf.io.FixedLenFeature([], tf.int64)})
        assert parsed["id"].numpy().tolist() == list(range(500))
