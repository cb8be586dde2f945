"""Checks what `tfdml records convert` prints, its exit codes, and what it leaves behind."""

import json
import os

import pytest
from typer.testing import CliRunner

from tfdml.cli.main import app


def convert(*arguments):
    return CliRunner().invoke(app, ["records", "convert", *map(str, arguments)])


@pytest.fixture
def optional_keys(tmp_path):
    """Returns a JSON Lines file whose rows have a key in one of twelve cases."""
    path = tmp_path / "a.jsonl"
    rows = ({"id": i, **({"age": i} if i % 12 == 0 else {})} for i in range(300))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_many_rejected_rows_are_a_warning_with_reasons_and_an_exit_code(optional_keys, tmp_path):
    done = convert(optional_keys, "-o", tmp_path / "out", "--on-error", "skip")
    assert done.exit_code == 3
    assert "300 in = 25 written + 275 rejected, in 1 shard: " in done.stdout
    assert "WARNING: 92% of the rows were rejected." in done.stderr
    assert "275 x columns ['age'] must have values" in done.stderr
    assert f"{tmp_path / 'out' / 'data.rejects.jsonl'}" in done.stderr


def test_a_limit_that_was_given_allows_them(optional_keys, tmp_path):
    options = ("--on-error", "skip", "--max-errors", 275)
    assert convert(optional_keys, "-o", tmp_path / "out", *options).exit_code == 0


def test_missing_keys_are_filled_or_left_out_on_purpose(optional_keys, tmp_path):
    assert convert(optional_keys, "-o", tmp_path / "a", "--on-missing", "age=nan").exit_code == 0
    done = convert(optional_keys, "-o", tmp_path / "b", "--on-missing", "age=skip")
    assert done.exit_code == 0
    assert "300 in = 25 written + 0 rejected + 275 skipped" in done.stdout
    assert "WARNING" not in done.stderr


def test_few_rejected_rows_are_no_failure(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" + "1\n" * 1200 + "x\ny\n")
    done = convert(tmp_path / "a.csv", "-o", tmp_path / "out", "--on-error", "skip")
    assert done.exit_code == 0
    assert "WARNING" not in done.stderr
    # Rows of one kind of error are counted together.
    assert "2 x 'a' must be int64. Received: 'x'" in done.stderr


def test_types_that_later_rows_break_name_the_schema(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" + "1\n" * 1200 + "1.5\n")
    done = convert(tmp_path / "a.csv", "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert "row 1201: 'a' must be int64. Received: '1.5'" in done.stderr
    assert "types are inferred from the first rows, and --schema gives others" in done.stderr
    (tmp_path / "schema.json").write_text('{"a": "float32"}')
    done = convert(tmp_path / "a.csv", "-o", tmp_path / "out", "--schema", tmp_path / "schema.json")
    assert done.exit_code == 0
    (tmp_path / "b.csv").write_text("a\n1\nx\n")
    schema = ("--schema", tmp_path / "schema.json")
    done = convert(tmp_path / "b.csv", "-o", tmp_path / "b", *schema)
    assert "--schema" not in done.stderr


@pytest.mark.parametrize("rows", ["1,2,3\n" * 20, "1,2\n" * 1200 + "x,\n"])
def test_a_failure_leaves_nothing_behind(tmp_path, rows):
    """Neither at the first rows nor at later ones, so that the next attempt is a fresh one."""
    (tmp_path / "a.csv").write_text("a,b\n" + rows)
    assert convert(tmp_path / "a.csv", "-o", tmp_path / "out").exit_code == 1
    assert os.listdir(tmp_path) == ["a.csv"]


def test_refused_rows_are_not_called_no_rows(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2,3\n" * 20)
    done = convert(tmp_path / "a.csv", "-o", tmp_path / "out", "--on-error", "skip")
    assert done.exit_code == 1
    assert "whose first 20 rows are all refused" in done.stderr
    assert "row 1: must have 2 cells, as the header. Received: 3" in done.stderr
    (tmp_path / "b.csv").write_text("a,b\n")
    done = convert(tmp_path / "b.csv", "-o", tmp_path / "out")
    assert "must have rows. Received: none in" in done.stderr


@pytest.mark.parametrize("shuffle", [(), ("--shuffle", 1)])
def test_a_data_set_of_no_records_is_not_written(tmp_path, shuffle):
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n' * 30)
    (tmp_path / "schema.json").write_text('{"a": "int64"}')
    options = ("--schema", tmp_path / "schema.json", "--on-error", "skip", *shuffle)
    done = convert(tmp_path / "a.jsonl", "-o", tmp_path / "out", *options)
    assert done.exit_code == 1
    assert "30 rows, all refused: 30 x 'a' must be an integer" in done.stderr
    assert not (tmp_path / "out").exists()


def test_room_is_told_in_a_unit_that_fits_and_nothing_is_left(tmp_path, monkeypatch):
    class Usage:
        free = 12_345

    (tmp_path / "a.csv").write_text("a\n" + "1234567\n" * 20_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    done = convert(tmp_path / "a.csv", "-o", tmp_path / "out")
    assert "must have room for about 160.0 kB. Received: 12.3 kB free at" in done.stderr
    assert os.listdir(tmp_path) == ["a.csv"]


def test_an_output_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "file").write_text("")
    for output, reason in ((tmp_path / "file", "File exists"), ("/proc/tfdml", "No such file")):
        done = convert(tmp_path / "a.csv", "-o", output)
        assert done.exit_code == 1
        assert f"can be written to. Received: '{output}'; {reason}" in done.stderr


def test_a_missing_plug_in_is_named_once(tmp_path):
    done = convert("gs://bucket/a.csv", "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert done.stderr.count("nstall") == 2  # "is installed", "Install gcsfs"
    assert "Install gcsfs." in done.stderr


def test_notices_are_printed(tmp_path):
    (tmp_path / "a.csv").write_text("a;b\n1;\n2;3\n")
    done = convert(tmp_path / "a.csv", "-o", tmp_path / "out")
    assert done.exit_code == 0
    assert "NOTE: " in done.stderr
    assert "delimiter ';'" in done.stderr
    assert "Column 'b' is stored as strings" in done.stderr


def test_a_schema_that_is_no_json_is_named(optional_keys, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text("label: int64")
    done = convert(optional_keys, "-o", tmp_path / "out", "--schema", schema)
    assert done.exit_code == 1
    assert f'such as {{"label": "int64"}}. Received: {schema}: ' in done.stderr
