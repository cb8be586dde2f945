"""Checks images written as TFRecords, verified, and trained on: two processes equal one."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.harness.command import run_python
from tests.recipes import cases
from tfdml.data import verify

OPTIONS = {"epochs": 2, "batch_size": 200, "limit": None, "seed": 0, "data": "auto"}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    directory = tmp_path_factory.mktemp("records")
    output = cases.run("make_records", {"directory": directory, "shards": 3, "data": "digits"})
    assert "digits" in output
    assert not verify(str(directory)).problems
    return directory


@pytest.mark.slow  # `tests/recipes/test_images_end_to_end.py` covers it by default.
def test_two_processes_agree_with_one(ranks, records, tmp_path):
    runs = {}
    for size in (1, 2):
        options = {**OPTIONS, "records": records, "output": tmp_path / str(size)}
        outputs = ranks(size).run(cases.run, "fashion_mnist", options)
        assert re.search("1500 images to train on, 297 to validate", outputs[0])
        assert outputs[1:] == [""] * (size - 1)
        runs[size] = json.loads((tmp_path / str(size) / "history.json").read_text())
    for name in ("loss", "val_loss"):
        one, two = (runs[size]["history"][name] for size in (1, 2))
        np.testing.assert_allclose(one, two, rtol=1e-3)
    assert runs[1]["history"]["val_accuracy"][-1] > 0.3


def convert(source: Path, output: Path, *options: str) -> None:
    """Converts with the command that the recipes give."""
    done = run_python(
        "-m", "tfdml.cli.main", "records", "convert", str(source), "-o", str(output), *options
    )
    assert done.returncode == 0, done.stderr


def number_in(output: str, name: str) -> float:
    return float(re.search(rf"{name} ([\d.]+)", output)[1])


@pytest.mark.slow  # `test_two_processes_agree_with_one` reads records of images the same way.
def test_table(ranks, tmp_path):
    cases.run("table", {"directory": tmp_path}, "make")
    convert(tmp_path / "cancer.parquet", tmp_path / "records", "--split", "train=0.8,test=0.2")
    options = {"records": tmp_path / "records", "epochs": 6, "batch_size": 64, "seed": 0}
    (one,), two = (ranks(size).run(cases.run, "table", options, "train") for size in (1, 2))
    assert number_in(two[0], "accuracy") > 0.9
    assert number_in(two[0], "curve") == pytest.approx(number_in(one, "curve"), abs=0.01)
    assert two[1] == ""


@pytest.mark.slow  # tests/data covers lengths.
def test_text(ranks, tmp_path):
    cases.run("text", {"path": tmp_path / "lines.jsonl", "limit": 120}, "make")
    convert(
        tmp_path / "lines.jsonl", tmp_path / "text", "--split", "train=0.9,test=0.1",
        "--shuffle", "1",
    )  # fmt: skip
    options = {"records": tmp_path / "text", "epochs": 4, "batch_size": 32, "seed": 0}
    (chief, other) = ranks(2).run(cases.run, "text", options, "train")
    assert number_in(chief, "accuracy") > 2 / 8
    assert other == ""
