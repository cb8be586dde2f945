"""Checks column-wise encoding: the bytes of single rows, and errors for the same rows."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data.format import columns, framing
from tfdml.data.format.framing import framed
from tfdml.data.format.schema import Feature, Schema
from tfdml.data.format.values import encoder
from tfdml.data.sources.arrays import ArraySource
from tfdml.data.sources.csv import CsvSource
from tfdml.data.sources.opening import open_source
from tfdml.data.sources.parquet import ParquetSource
from tfdml.data.sources.source import Source
from tfdml.data.write import write_tfrecords
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions

SCHEMA = Schema(
    a=Feature("int64"),
    bé=Feature("int64", (3,)),
    c=Feature("int64", classes=("x", "y")),
    d=Feature("float32"),
    e=Feature("float32", (2, 2)),
    f=Feature("raw", (2, 3), "uint8"),
    g=Feature("raw", (), "float64"),
    h=Feature("string"),
    **{"i" * 130: Feature("int64")},
)
WHOLE = st.integers(-(2**63), 2**63 - 1)
# Of all sizes, so that varints have all lengths.
SIZED = st.one_of(st.integers(0, 300), st.integers(0, 2**21), WHOLE)
SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tables(draw) -> dict:
    rows = draw(st.integers(1, 20))

    def drawn(values, *shape):
        count = int(np.prod((rows, *shape)))
        return draw(st.lists(values, min_size=count, max_size=count))

    return {
        "a": np.array(drawn(SIZED), np.int64),
        "bé": np.array(drawn(SIZED, 3), np.int64).reshape(rows, 3),
        "c": np.array(drawn(st.integers(0, 1)), np.uint8),
        "d": np.array(drawn(SINGLE), np.float64),
        "e": np.array(drawn(SINGLE, 2, 2), np.float32).reshape(rows, 2, 2),
        "f": np.array(drawn(st.integers(0, 255), 6), np.uint8).reshape(rows, 2, 3),
        "g": np.array(drawn(st.floats(allow_nan=False, allow_infinity=False)), ">f8"),
        "h": drawn(st.one_of(st.text(max_size=9), st.binary(max_size=200))),
        "i" * 130: np.array(drawn(SIZED), np.int64),
    }


def one_by_one(schema: Schema, table: dict, **options) -> framing.Frames:
    encode = encoder(schema, **options)
    # Python's own numbers, as sources yield them; for "g", NumPy's.
    values = [c.tolist() if n not in "gh" and c.ndim == 1 else c for n, c in table.items()]
    return framed([encode(dict(zip(table, row, strict=True))) for row in zip(*values, strict=True)])


@given(tables())
@settings(max_examples=60, deadline=None)
def test_columns_encode_to_the_bytes_of_single_rows(table):
    wanted = one_by_one(SCHEMA, table)
    found = columns.encode(SCHEMA, table)
    if found is None:
        # Strings of very uneven lengths fall back to single rows.
        assert max(map(len, table["h"])) > 64
        found = columns.encode(SCHEMA, {**table, "h": [""] * len(table["a"])})
        assert found is not None
    else:
        assert found.data == wanted.data
        np.testing.assert_array_equal(found.lengths, wanted.lengths)


UNSOUND = {
    "nan": ("d", np.array([1.0, np.nan])),
    "infinite": ("e", np.array([[[1, 2], [3, np.inf]]] * 2, np.float32)),
    "beyond float32": ("d", np.array([1.0, 1e300])),
    "raw nan": ("g", np.array([1.0, np.nan])),
    "no class": ("c", np.array([0, 2])),
    "a class below 0": ("c", np.array([0, -1])),
    "beyond int64": ("a", np.array([1, 2**63], np.uint64)),
    "a fraction": ("a", np.array([1.0, 2.0])),
    "a truth for a number": ("d", np.array([True, False])),
    "another shape": ("e", np.zeros((2, 4), np.float32)),
    "another dtype": ("f", np.zeros((2, 2, 3), np.int8)),
    "no string": ("h", ["x", 1]),
    "nothing": ("h", ["x", None]),
}


def sound() -> dict:
    return {
        "a": np.array([1, 2]),
        "bé": np.zeros((2, 3), np.int32),
        "c": np.array([0, 1]),
        "d": np.array([1, 2]),
        "e": np.zeros((2, 2, 2)),
        "f": np.zeros((2, 2, 3), np.uint8),
        "g": np.zeros(2),
        "h": ["x", b"y"],
        "i" * 130: np.array([True, False]),
    }


@pytest.mark.parametrize("case", UNSOUND)
def test_invalid_values_fall_back_to_single_rows(case):
    assert columns.encode(SCHEMA, sound()) is not None
    name, values = UNSOUND[case]
    assert columns.encode(SCHEMA, sound() | {name: values}) is None


def test_missing_or_surplus_values_fall_back_to_single_rows():
    assert columns.encode(SCHEMA, {n: c for n, c in sound().items() if n != "a"}) is None
    assert columns.encode(SCHEMA, sound() | {"z": np.zeros(2)}) is None


def test_nan_is_encoded_where_allowed():
    schema, table = Schema(d=Feature("float32")), {"d": np.array([1.0, np.nan, np.inf])}
    wanted = one_by_one(schema, table, allow_nonfinite=True)
    assert columns.encode(schema, table, allow_nonfinite=True).data == wanted.data


def test_too_long_records_fall_back_to_single_rows(monkeypatch):
    schema, table = Schema(x=Feature("float32", (8,))), {"x": np.zeros((3, 8), np.float32)}
    assert columns.encode(schema, table) is not None
    monkeypatch.setattr(framing, "LARGEST_RECORD", 10)
    assert columns.encode(schema, table) is None


def converted(path, directory, by_row: bool, monkeypatch, **options) -> dict | str:
    """Returns the bytes written for a file, or the error."""
    with monkeypatch.context() as patched:
        if by_row:
            for source in (CsvSource, ParquetSource, ArraySource):
                patched.setattr(source, "columns", Source.columns)
        try:
            convert(open_source([str(path)]), str(directory), ConversionOptions(**options))
        except ValueError as error:
            return str(error)
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


NUMBERS = "a,b,c\n" + "".join(f"{i},{i / 3:.4f},t{i}\n" for i in range(300))
CELLS = {
    "plain": NUMBERS,
    "quoted": NUMBERS + '1,2.5,"x,\ny"\n',
    "quoted on one line": NUMBERS + '1,2.5,"x"\n',
    "blank lines": NUMBERS.replace("\n7,", "\n\n7,", 1) + "\n\n",
    "windows": NUMBERS.replace("\n", "\r\n"),
    "lone return": NUMBERS + "1,2.5,x\ry\n",
    "lone return and a blank line": NUMBERS + "1,2.5,x\r3,4.5,y\n\n",
    "zero byte": NUMBERS + "1,2.5,x\0y\n",
    "hexadecimal": NUMBERS + "0x10,2.5,x\n",
    "hexadecimal, capital": NUMBERS + "0X10,2.5,x\n",
    "plus": NUMBERS + "+5,+2.5,x\n",
    "spaces": NUMBERS + " 5 , 2.5 , x \n",
    "underscore": NUMBERS + "1_0,2.5,x\n",
    "digits of another script": NUMBERS + "٣,2.5,x\n",
    "nan": NUMBERS + "1,nan,x\n",
    "beyond float32": NUMBERS + "1,1e300,x\n",
    "beyond float64": NUMBERS + "1,1e400,x\n",
    "beyond int64": NUMBERS + "9223372036854775808,1,x\n",
    "no number": NUMBERS + "true,1,x\n",
    "empty cell": NUMBERS + ",1,x\n",
    "empty string": NUMBERS + "1,1,\n",
    "words for nothing": NUMBERS + "1,1,NA\n1,1,null\n",
    "ragged": NUMBERS + "1,2\n",
    "not utf-8": NUMBERS.encode() + b"1,1,\xff\n",
    "without a last line break": NUMBERS[:-1],
}


@pytest.mark.parametrize("case", CELLS)
def test_csv_is_read_the_same_by_columns_and_rows(tmp_path, monkeypatch, case):
    data = CELLS[case]
    # Rows beyond the sampled ones, so none of this changes the schema.
    head = "".join(f"{i},0.5,s\n" for i in range(1000))
    data = data if isinstance(data, bytes) else data.encode()
    (tmp_path / "a.csv").write_bytes(data.replace(b"a,b,c\n", b"a,b,c\n" + head.encode(), 1))
    both = [
        converted(tmp_path / "a.csv", tmp_path / f"out{by_row}", by_row, monkeypatch, shards=3)
        for by_row in (False, True)
    ]
    assert both[0] == both[1]


def test_arrays_and_parquet_are_read_the_same_by_columns_and_rows(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        x=rng.normal(size=(500, 4)).astype(np.float32),
        y=rng.integers(-5, 2**40, 500),
        z=rng.integers(0, 9, (500, 2, 2)).astype(">u2"),
        s=np.array([f"s{i}" for i in range(500)]),
    )
    table = {
        "i": pa.array(range(5000), pa.uint16()),
        "f": pa.array(rng.normal(size=5000).astype(np.float32)),
        "s": pa.array([f"t{i % 70}" for i in range(5000)]),
        "b": pa.array([i % 3 == 0 for i in range(5000)]),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    for name in ("a.npz", "a.parquet"):
        both = [
            converted(tmp_path / name, tmp_path / f"{name}{r}", r, monkeypatch, shuffle_seed=1)
            for r in (False, True)
        ]
        assert isinstance(both[0], dict), both[0]
        assert both[0] == both[1]


@pytest.mark.parametrize("name", ["a.csv", "a.npz", "a.parquet"])
def test_valid_rows_are_never_read_one_by_one(tmp_path, monkeypatch, name):
    (tmp_path / "a.csv").write_text(NUMBERS)
    np.savez(tmp_path / "a.npz", x=np.ones((50, 4), np.float32), y=np.arange(50))
    pq.write_table(pa.table({"x": [1, 2], "s": ["a", "b"]}), tmp_path / "a.parquet")
    source = open_source([str(tmp_path / name)])

    def rows(*_):
        raise AssertionError("row by row")

    monkeypatch.setattr(type(source), "rows", rows)
    manifest = convert(source, str(tmp_path / "out"), ConversionOptions())
    assert manifest.counts["written"] == manifest.counts["in"] > 0


def test_rows_behind_a_bad_one_are_converted_too(tmp_path):
    values = np.linspace(0, 1, 30_000).astype(np.float32)
    values[[0, 9000, 29_999]] = np.nan
    np.save(tmp_path / "x.npy", values)
    options = ConversionOptions(on_error="skip", split_key="x", splits=(("a", 0.5), ("b", 0.5)))
    manifest = convert(open_source([str(tmp_path / "x.npy")]), str(tmp_path / "out"), options)
    assert manifest.counts == {"in": 30_000, "written": 29_997, "rejected": 3, "skipped": 0}
    lines = (tmp_path / "out" / "data.rejects.jsonl").read_text().splitlines()
    where = [json.loads(line)["where"] for line in lines]
    assert [w.rsplit(" ", 1)[-1] for w in where] == ["0", "9000", "29999"]


def python_rows(case: str) -> list[dict]:
    rows = [
        {"i": i, "n": np.int16(i), "f": i / 3, "x": np.full(3, i, np.float32), "s": f"t{i}"}
        for i in range(1300)
    ]
    changes = {
        "plain": {},
        "a truth among numbers": {"i": True},
        "an integer among fractions": {"f": 7},
        "a list among arrays": {"x": [1.0, 2.0, 3.0]},
        "another dtype": {"x": np.ones(3)},
        "bytes among strings": {"s": b"\xff"},
        "another shape": {"x": np.ones(4, np.float32)},
        "a truth among fractions": {"f": True},
        "a fraction among integers": {"i": 1.5},
        "beyond int64": {"i": 2**63},
        "an array for a number": {"n": np.array(5)},
        "nan": {"f": float("nan")},
        "nothing": {"s": None},
        "one more": {"z": 1},
    }
    rows[1100].update(changes[case])
    return rows


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("plain", None),
        ("a truth among numbers", None),
        ("an integer among fractions", None),
        ("a list among arrays", None),
        ("another dtype", None),
        ("bytes among strings", None),
        ("another shape", "Record 1100: 'x' must have shape"),
        ("a truth among fractions", "Record 1100: 'f' must be a number"),
        ("a fraction among integers", "Record 1100: 'i' must be an integer"),
        ("beyond int64", "Record 1100: 'i' must fit int64"),
        ("an array for a number", "Record 1100: 'n' must be an integer"),
        ("nan", "Record 1100: 'f' must be finite"),
        ("nothing", "Record 1100: 's' must be a string"),
        ("one more", "Record 1100: columns"),
    ],
)
def test_python_records_are_written_the_same_by_columns_and_rows(
    tmp_path, monkeypatch, case, message
):
    written = []
    for by_row in (False, True):
        directory = tmp_path / str(by_row)
        with monkeypatch.context() as patched:
            if by_row:
                patched.setattr(write_tfrecords, "_columns", lambda *_: None)
            try:
                write_tfrecords.write_tfrecords(python_rows(case), str(directory), shards=3)
            except ValueError as error:
                written.append(str(error))
            else:
                written.append({p.name: p.read_bytes() for p in sorted(directory.iterdir())})
    assert written[0] == written[1]
    if message is None:
        assert isinstance(written[0], dict), written[0]
    else:
        assert written[0].startswith(message)
        assert not list((tmp_path / "False").iterdir())
