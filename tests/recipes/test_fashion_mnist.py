"""Checks the recipe, the sources of its images, and the comparison of its runs."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.harness.command import ROOT, run_python

sys.path.insert(0, str(ROOT / "recipes"))
import images

RECIPE = ["recipes/fashion_mnist.py", "--data", "digits", "--epochs", "2", "--batch-size", "100"]


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.asarray(values.shape, ">u4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


@pytest.fixture
def prefix(tmp_path):
    directory = tmp_path / "share" / "datasets" / "fashion-mnist"
    pixels = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256
    for part in ("train", "t10k"):
        write_idx(directory / f"{part}-images-idx3-ubyte.gz", pixels)
        write_idx(directory / f"{part}-labels-idx1-ubyte.gz", np.array([7, 0, 9]))
    return tmp_path


def test_debian_files(prefix):
    loaded = images.from_debian(["/nonexistent", str(prefix)])
    assert loaded.x.shape == loaded.x_val.shape == (3, 28, 28, 1)
    assert loaded.x.dtype == np.float32
    assert loaded.x.min() == 0
    assert loaded.x.max() == 1
    assert loaded.x[0, 1, 0, 0] == np.float32(28 / 255)
    assert loaded.y.tolist() == [7, 0, 9]
    assert len(loaded.limited(2).x) == len(loaded.limited(2).y) == 2


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b"PK" + b, lambda b: b""])
def test_damaged_debian_file(prefix, damage):
    path = prefix / "share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(images.DataUnavailable, match="is damaged"):
        images.from_debian([str(prefix)])


def test_idx_with_too_few_values(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 5, 1, 2])))
    with pytest.raises(ValueError, match="must hold 5 values. Received: 2"):
        images.read_idx(path)


def test_auto_uses_the_first_source_that_works(prefix):
    def absent():
        return images.from_debian(["/nonexistent"])

    assert "digits" in images.first_of([absent, images.from_digits]).name
    assert "Debian" in images.first_of([lambda: images.from_debian([str(prefix)]), absent]).name
    with pytest.raises(images.DataUnavailable, match="no source of images works: Debian"):
        images.first_of([absent, absent])


def test_failed_download_is_reported():
    with pytest.raises(images.DataUnavailable, match="source: RuntimeError: no network"):
        images._download("source", "raise RuntimeError('no network')")


def test_digits():
    loaded = images.load("digits")
    assert loaded.x.shape == (1500, 8, 8, 1)
    assert loaded.x.max() == 1
    assert len(loaded.x_val) == len(loaded.y_val) == 297


def test_unknown_source():
    done = run_python("recipes/fashion_mnist.py", "--data", "nonsense")
    assert done.returncode == 1
    assert "Received: 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    output = tmp_path_factory.mktemp("one")
    done = run_python(*RECIPE, "--output", str(output))
    assert done.returncode == 0, done.stderr
    return output, done.stdout


HOROVODRUN = [
    *("-c", "from horovod.runner.launch import run_commandline; run_commandline()"),
    *("-np", "2", sys.executable, *RECIPE, "--strategy", "horovod"),
]
LAUNCH = ["-m", "tfdml.cli.main", "launch", "--workers", "2", *RECIPE]
PAIRS = [pytest.param(HOROVODRUN, marks=pytest.mark.slow), LAUNCH]


@pytest.fixture(scope="module", params=PAIRS, ids=["horovodrun", "launch"])
def two(tmp_path_factory, request):
    output = tmp_path_factory.mktemp("two")
    done = run_python(*request.param, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


def test_one_process(one):
    output, stdout = one
    facts = json.loads((output / "history.json").read_text())
    assert "scikit-learn's digits: 1500 images to train on, 297 to validate; 1 process" in stdout
    assert facts["processes"] == 1
    assert facts["samples_per_second"] > 0
    assert len(facts["seconds"]) == len(facts["history"]["val_accuracy"]) == 2
    assert facts["history"]["val_accuracy"][-1] > 0.3
    with np.load(output / "weights.npz") as weights:
        assert len(weights.files) == 8


def test_two_processes_agree_with_one(one, two, tmp_path):
    assert "; 2 processes" in two[1]
    assert two[1].count("written: ") == 1
    assert two[1].count("Epoch 1/2") == 1, "One progress bar, the chief's."
    picture = tmp_path / "curves.png"
    done = run_python(
        "tools/compare_runs.py", str(one[0]), str(two[0]), "--plot", str(picture), COLUMNS="120"
    )
    assert done.returncode == 0, done.stdout
    assert "2 processes trained as 1 process did" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_comparison_detects_differences(one, tmp_path):
    facts = json.loads((one[0] / "history.json").read_text())
    facts["history"]["loss"][0] += 0.05
    (tmp_path / "history.json").write_text(json.dumps(facts))
    (tmp_path / "weights.npz").write_bytes((one[0] / "weights.npz").read_bytes())
    compare = ["tools/compare_runs.py", str(one[0]), str(tmp_path), "--plot", f"{tmp_path}/p.png"]
    done = run_python(*compare)
    assert done.returncode == 1
    assert "the losses differ by 5.0e-02" in done.stdout


def test_killed_run_must_be_bit_identical(one, tmp_path):
    (tmp_path / "history.json").write_bytes((one[0] / "history.json").read_bytes())
    with np.load(one[0] / "weights.npz") as stored:
        weights = {name: stored[name] for name in stored.files}
    compare = ["tools/compare_runs.py", str(one[0]), str(one[0]), "--plot", f"{tmp_path}/p.png"]
    for code in (0, 1):
        np.savez(tmp_path / "weights.npz", **weights)
        done = run_python(*compare, "--killed", str(tmp_path))
        assert done.returncode == code, done.stdout
        assert ("ended with the same bits" in done.stdout) == (code == 0)
        last = list(weights)[-1]
        weights[last] = np.nextafter(weights[last], np.float32(9))


@pytest.mark.slow  # `tools/demo` does it too.
def test_a_rank_is_killed_in_the_middle(two, tmp_path):
    checkpoints = str(tmp_path / "checkpoints")
    done = run_python(
        *("tools/kill_a_rank.py", "--checkpoints", checkpoints, "--step", "50", "--"),
        *(
            sys.executable,
            "-m",
            "tfdml.cli.main",
            "launch",
            "--workers",
            "2",
            "--max-restarts",
            "1",
        ),
        *(*RECIPE, "--epochs", "8", "--checkpoint", checkpoints, "--output", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-- kill -9" in done.stdout
    assert "restart 1 of 1" in done.stderr
    assert len(json.loads((tmp_path / "history.json").read_text())["history"]["loss"]) == 8
