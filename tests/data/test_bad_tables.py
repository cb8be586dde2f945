"""Checks that malformed tables are reported with file, row and reason, and lose no other row."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.opened import rows, stored
from tfdml.data.format.schema import Schema
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions

GOOD_CSV = {
    "bom": (b"\xef\xbb\xbfa,b\n1,x\n", [{"a": 1, "b": "x"}]),
    "quoted newlines": (b'a,b\n1,"x\ny, ""z"""\n2,w\n', [1, 2]),
    "windows": (b"a,b\r\n1,x\r\n\r\n2,y", [1, 2]),
}


@pytest.mark.parametrize("name", GOOD_CSV)
def test_csv(tmp_path, name):
    data, wanted = GOOD_CSV[name]
    (tmp_path / "a.csv").write_bytes(data)
    found = rows(tmp_path / "a.csv")
    assert found == wanted or [row["a"] for row in found] == wanted
    if name == "quoted newlines":
        assert found[0]["b"] == 'x\ny, "z"'


MANY = b"".join(b"%d,x\n" % i for i in range(2000))


BAD_CSV = {
    "not utf-8": (b"a,b\n1,x\n2,\xff\n", "row 2: must be in UTF-8. Received: byte 0xff"),
    "utf-16": ("a,b\n1,x\n".encode("utf-16"), "must be in UTF-8. Received: .*in UTF-16"),
    "ragged": (b"a,b\n1,x\n2\n", "row 2: must have 2 cells, as the header. Received: 1"),
    "header twice": (b"a,b,a\n1,x,2\n", "must name each column once"),
    "empty": (b"", "which is empty"),
    "only a header": (b"a,b\n", "must have rows"),
    "overflow": (b"a\n9223372036854775808\n", "row 1: 'a' must fit int64"),
    "nan": (b"a\n1.5\nnan\n", "row 2: 'a' must be finite. Received: nan"),
    "float32 overflow": (b"a\n1.5\n1e300\n", "row 2: 'a' must fit float32"),
    "type change": (b"a,b\n" + MANY + b"y,x\n", "row 2001: 'a' must be int64. Received: 'y'"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_wrong_csv_is_refused(tmp_path, name):
    data, message = BAD_CSV[name]
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / "a.csv")


BAD_JSONL = {
    "missing": ('{"a": 1, "b": 2}\n{"a": 1}', "row 2: columns ..b.. must have .* b=nan"),
    "more": ('{"a": 1}\n' * 1500 + '{"a": 1, "c": 2}', "columns ..c.. are not in the schema"),
    "null": ('{"a": 1}\n{"a": null}', "row 2: columns ..a.. must have values. Received: none"),
    "twice": ('{"a": 1}\n{"a": 1, "a": 2}', "a name appears twice"),
    "cut": ('{"a": 1}\n{"a": ', "row 2: is not JSON"),
    "no object": ('{"a": 1}\n[1]', "row 2: is not JSON: must be an object"),
}


@pytest.mark.parametrize("name", BAD_JSONL)
def test_wrong_jsonl_is_refused(tmp_path, name):
    text, message = BAD_JSONL[name]
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / "a.jsonl")


def test_parquet_with_nested_columns(tmp_path):
    wanted = [{"s": {"x": 1, "y": [1.5, 2.5]}, "l": [[1], [2, 3]], "t": "a"}]
    pq.write_table(pa.Table.from_pylist(wanted), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [
        {"s.x": 1, "s.y": [1.5, 2.5], "l": [[1], [2, 3]], "t": "a"}
    ]


def test_wrong_parquet_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1, None], "b": [1, 2]}), path)
    with pytest.raises(
        ValueError, match=r"row 1: columns \['a'\] must have values. Received: none"
    ):
        rows(path)
    pq.write_table(pa.table({"a": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))}), path)
    with pytest.raises(ValueError, match="Column 'a' must hold numbers"):
        rows(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="An input must be undamaged"):
        rows(path)


def test_a_schema_must_have_the_columns_of_the_header(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    for names in (["a"], ["a", "b", "c"]):
        schema = Schema.from_json(dict.fromkeys(names, "int64"))
        with pytest.raises(ValueError, match="`schema` must have the columns of the header"):
            open_source([str(tmp_path / "a.csv")], schema=schema)
    (tmp_path / "b.csv").write_text("a,c\n1,2\n")
    with pytest.raises(ValueError, match="All files must have one header"):
        open_source([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")])


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "Infinity"])
def test_nonfinite_values_are_accepted_only_on_request(tmp_path, value):
    (tmp_path / "a.csv").write_text(f"a\n1.5\n{value}\n")
    source = open_source([str(tmp_path / "a.csv")])
    with pytest.raises(ValueError, match="row 2: 'a' must be finite"):
        convert(source, str(tmp_path / "strict"), ConversionOptions())
    convert(source, str(tmp_path / "out"), ConversionOptions(allow_nonfinite=True))
    assert [float(r["a"]) for r in stored(tmp_path / "out")][0] == 1.5
    found = [float(r["a"]) for r in stored(tmp_path / "out")][1]
    assert not np.isfinite(found)


def test_jsonl_in_utf8_with_and_without_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"a": 1, "b": {"c": "\xc3\xa9"}}\n\n{"a": 2, "b": {"c": ""}}'
    )
    assert rows(tmp_path / "a.jsonl") == [{"a": 1, "b.c": "é"}, {"a": 2, "b.c": ""}]
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "x"}\n{"a": "\xff"}\n')
    with pytest.raises(ValueError, match="row 2: must be in UTF-8. Received: byte 0xff"):
        rows(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"a": 1.5}\n{"a": NaN}')
    with pytest.raises(ValueError, match="row 2: 'a' must be finite"):
        rows(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": 9223372036854775808}')
    with pytest.raises(ValueError, match="row 2: 'a' must fit int64"):
        rows(tmp_path / "d.jsonl")


def test_parquet_with_types_that_records_cannot_hold(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [[{"x": 1}]]}), path)
    with pytest.raises(ValueError, match="Column 'a' must hold numbers"):
        rows(path)
    pq.write_table(pa.table({"a": [[1, None]]}), path)
    with pytest.raises(ValueError, match="row 0: 'a' must be"):
        rows(path)
    pq.write_table(pa.table({"a": pa.array([2**63], pa.uint64())}), path)
    with pytest.raises(ValueError, match="row 0: 'a' must fit int64"):
        rows(path)


@pytest.mark.parametrize(
    ("schema", "message"),
    [({}, "must name at least one"), ({"a": "int8"}, "`kind` must be one of")],
)
def test_wrong_schemas(schema, message):
    with pytest.raises(ValueError, match=message):
        Schema.from_json(schema)
