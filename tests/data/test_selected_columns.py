"""Checks which columns of tables are stored, as which types, and what replaces missing values."""

import datetime
import json
import math

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tfdml.data.format.schema import FLOAT, INT64, STRING, Schema
from tfdml.data.read.read_tfrecords import read_tfrecords
from tfdml.data.sources.opening import open_source
from tfdml.data.sources.selected_columns import ColumnOptions
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions

# Rows 0, 3, 6 and 9 have no age; rows 0 and 5 have no city.
AGES = [None if i % 3 == 0 else i for i in range(10)]
CITIES = [None if i % 5 == 0 else f"c{i}" for i in range(10)]


def write(kind: str, path) -> str:
    """Writes the rows above as a table; returns its path."""
    path = path / f"a.{kind}"
    if kind == "csv":
        rows = (f"{i},{'' if a is None else a},{c or ''}" for i, a, c in every_row())
        path.write_text("id,age,city\n" + "\n".join(rows) + "\n")
    elif kind == "jsonl":
        rows = ({"id": i, "age": a, "city": c} for i, a, c in every_row())
        # Some keys are absent, others are null.
        lines = ({k: v for k, v in row.items() if v is not None or row["id"] > 3} for row in rows)
        path.write_text("\n".join(map(json.dumps, lines)))
    else:
        table = pa.table({"id": range(10), "age": AGES, "city": CITIES})
        pq.write_table(table, path, row_group_size=4)
    return str(path)


def every_row():
    return zip(range(10), AGES, CITIES, strict=True)


def converted(path, tmp_path, drop=(), on_missing=(), schema=None, **options):
    """Converts a table; returns the manifest and the values of each column."""
    columns = ColumnOptions.parse(drop, on_missing)
    source = open_source([str(path)], columns=columns, schema=schema)
    manifest = convert(source, str(tmp_path / "out"), ConversionOptions(**options))
    (batch,) = read_tfrecords(manifest.path, 10, shuffle=False)
    # A single column is no dictionary.
    batch = batch if isinstance(batch, dict) else {next(iter(manifest.schema)): batch}
    return manifest, {name: np.asarray(value).tolist() for name, value in batch.items()}


KINDS = ("csv", "jsonl", "parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_defaults_replace_missing_values(tmp_path, kind):
    rules = ["age=nan", "city=default=unknown"]
    manifest, columns = converted(write(kind, tmp_path), tmp_path, on_missing=rules)
    assert manifest.schema["age"].kind == FLOAT
    assert columns["id"] == list(range(10))
    for found, wanted in zip(columns["age"], AGES, strict=True):
        assert math.isnan(found) if wanted is None else found == wanted
    assert columns["city"] == [(c or "unknown").encode() for c in CITIES]


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_keeps_the_type(tmp_path, kind):
    rules = ["age=default=-1", "default=x"]
    manifest, columns = converted(write(kind, tmp_path), tmp_path, on_missing=rules)
    assert manifest.schema["age"].kind == INT64
    assert columns["age"] == [-1 if a is None else a for a in AGES]
    # An empty cell of CSV is a string, unless a rule names its column.
    empty = "" if kind == "csv" else "x"
    assert columns["city"] == [(c or empty).encode() for c in CITIES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["age=skip", "skip"])
def test_rows_are_skipped_on_purpose(tmp_path, kind, rule):
    """They are no errors: a strict conversion ends well, and no limit counts them."""
    path = write(kind, tmp_path)
    if kind != "csv" and rule == "age=skip":
        manifest, columns = converted(path, tmp_path, ["city"], [rule], max_errors=0)
    else:
        manifest, columns = converted(path, tmp_path, (), [rule], max_errors=0)
    without = {i for i, a, c in every_row() if a is None}
    if rule == "skip" and kind != "csv":
        without |= {i for i, a, c in every_row() if c is None}
    assert columns["id"] == [i for i in range(10) if i not in without]
    assert manifest.counts == {
        "in": 10,
        "written": 10 - len(without),
        "rejected": 0,
        "skipped": len(without),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_value_without_a_rule_is_an_error(tmp_path, kind):
    path = write(kind, tmp_path)
    schema = Schema.from_json({"id": "int64", "age": "int64"})
    message = r"columns \['age'\] must have values. Received: none. .* --on-missing age=nan"
    with pytest.raises(ValueError, match=message):
        converted(path, tmp_path, ["city"], schema=schema)
    manifest, columns = converted(path, tmp_path, ["city"], schema=schema, on_error="skip")
    assert manifest.counts["rejected"] == 4
    assert columns["id"] == [1, 2, 4, 5, 7, 8]


def test_numbers_with_empty_cells_become_strings_with_a_notice(tmp_path):
    path = write("csv", tmp_path)
    source = open_source([path])
    assert source.schema["age"].kind == STRING
    (notice,) = source.notices
    assert "Column 'age' is stored as strings: 4 of the first 10 cells are empty" in notice
    assert "--on-missing age=nan" in notice
    quiet = open_source([path], columns=ColumnOptions.parse((), ["age=nan"]))
    assert quiet.notices == ()


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_columns_are_not_stored(tmp_path, kind):
    manifest, columns = converted(write(kind, tmp_path), tmp_path, drop=["age", "city"])
    assert list(manifest.schema) == ["id"] == list(columns)


def test_null_objects_have_none_of_their_fields(tmp_path):
    rows = [{"a": {"b": 1, "c": "x"}}, {"a": None}, {"a": {"b": 2}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rules = ["a.b=default=0", "a.c=default=-"]
    _, columns = converted(tmp_path / "a.jsonl", tmp_path, on_missing=rules)
    assert columns == {"a.b": [1, 0, 2], "a.c": [b"x", b"-", b"-"]}
    assert list(open_source([str(tmp_path / "a.jsonl")]).schema) == ["a.b", "a.c"]
    with pytest.raises(ValueError, match=r"`drop` must leave a column. Received: \['a'\]"):
        converted(tmp_path / "a.jsonl", tmp_path, drop=["a"])


WRONG = {
    "unknown column": ((), ["size=nan"], "`on_missing` must name columns of the input"),
    "unknown dropped": (["size"], (), r"`drop` must name columns .*'city'.* Received: 'size'"),
    "no rule": ((), ["age=zero"], "`on_missing` must be nan, skip or default=VALUE"),
    "two rules": ((), ["age=nan", "age=skip"], "one rule for a column. Received: 'age=skip'"),
    "nan of strings": ((), ["city=nan"], "must be for a column of numbers. Received: 'city'"),
    "wrong default": ((), ["age=default=x"], "'age' a value of its type, int64 .* Received: 'x'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(tmp_path, name):
    drop, on_missing, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        converted(write("csv", tmp_path), tmp_path, drop, on_missing)


def test_a_resumed_conversion_must_have_the_same_rules(tmp_path):
    """Records of one data set are filled by one rule."""
    (tmp_path / "a.csv").write_text("id,x\n" + "".join(f"{i},\n" for i in range(20)) + "x,1\n")
    schema = Schema.from_json({"id": "int64", "x": "int64"})
    out = str(tmp_path / "out")

    def run(rule: str, **options) -> None:
        columns = ColumnOptions.parse((), [rule])
        source = open_source([str(tmp_path / "a.csv")], schema=schema, columns=columns)
        convert(source, out, ConversionOptions(shards=3), processes=1, **options)

    with pytest.raises(ValueError, match="row 21: 'id' must be int64"):
        run("x=default=0")
    with pytest.raises(ValueError, match="same input and options. Received: .*input options"):
        run("x=default=1", resume=True)


def test_times_become_integers_and_categories_strings(tmp_path):
    frame = pd.DataFrame(
        {
            "t": pd.date_range("2020-01-01", periods=4).astype("datetime64[ms]"),
            "zoned": pd.date_range("2020-01-01", periods=4, tz="UTC").astype("datetime64[us, UTC]"),
            "day": [datetime.date(1970, 1, 3)] * 4,
            "took": pd.to_timedelta([1, 2, 3, 4], unit="s").astype("timedelta64[s]"),
            "kind": pd.Categorical(["a", "b", "a", "b"]),
        }
    )
    frame.to_parquet(tmp_path / "a.parquet")
    manifest, columns = converted(tmp_path / "a.parquet", tmp_path)
    assert [manifest.schema[n].kind for n in frame] == [*[INT64] * 4, STRING]
    seconds = 1577836800
    assert columns["t"] == [(seconds + i * 86400) * 1000 for i in range(4)]
    assert columns["zoned"] == [(seconds + i * 86400) * 10**6 for i in range(4)]
    assert columns["day"] == [2] * 4
    assert columns["kind"] == [b"a", b"b", b"a", b"b"]
    notices = "\n".join(open_source([str(tmp_path / "a.parquet")]).notices)
    assert "'t' (timestamp[ms]) is stored as int64, milliseconds since 1970-01-01." in notices
    assert "microseconds since 1970-01-01 UTC" in notices
    assert "'day' (date32[day]) is stored as int64, days since" in notices
    assert "'kind' (categories) is stored as its values, string" in notices


def test_times_in_lists_and_structs_are_integers_too(tmp_path):
    kind = pa.list_(pa.timestamp("ms"))
    table = pa.table(
        {
            "s": pa.array([{"d": 3}, {"d": 4}], pa.struct([("d", pa.date32())])),
            "l": pa.array([[1, 2], [3]], kind),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source([str(tmp_path / "a.parquet")])
    (chunk,) = source.chunks()
    assert [row.values for row in source.rows(chunk.key)] == [
        {"s.d": 3, "l": [1, 2]},
        {"s.d": 4, "l": [3]},
    ]
    assert len(source.notices) == 2


def test_columns_that_no_record_can_hold_are_dropped(tmp_path):
    table = pa.table({"a": [1], "m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"Column 'm' must hold .* leave it out \(--drop m\)"):
        converted(tmp_path / "a.parquet", tmp_path)
    manifest, columns = converted(tmp_path / "a.parquet", tmp_path, drop=["m"])
    assert columns == {"a": [1]}


def test_arrays_that_do_not_fit_are_left_out(tmp_path):
    """HDF5 files often hold constants and weights beside the rows."""
    arrays = {
        "x": np.arange(4),
        "one": np.float32(1),
        "w": np.zeros((3, 2)),
        "c": np.zeros(4, "c8"),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    for drop, message in (
        ([], r"Received: 'one' of shape \(\). Leave it out \(--drop one\)"),
        (["one"], r"same number of rows. .*'w': 3.* \(--drop NAME\)"),
        (["one", "w"], r"Array 'c': .* dtype complex64. Leave it out \(--drop c\)"),
        (["one", "w", "d"], "`drop` must name columns of the input"),
    ):
        with pytest.raises(ValueError, match=message):
            converted(tmp_path / "a.h5", tmp_path, drop)
    _, columns = converted(tmp_path / "a.h5", tmp_path, ["one", "w", "c"])
    assert columns == {"x": [0, 1, 2, 3]}


def test_several_processes_fill_the_same_values(tmp_path):
    """A source with rules can be sent to the processes of a conversion."""
    path = write("parquet", tmp_path)
    columns = ColumnOptions.parse(["city"], ["age=default=7"])
    for processes in (1, 2):
        source = open_source([path], columns=columns)
        out = str(tmp_path / f"out{processes}")
        convert(source, out, ConversionOptions(shards=2), processes=processes)
    one, two = (
        [p.read_bytes() for p in sorted((tmp_path / f"out{n}").glob("*.tfrecord"))] for n in (1, 2)
    )
    assert len(one) == 2
    assert one == two
