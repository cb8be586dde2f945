"""Runs `tfdml estimate-memory` on real scripts."""

import json

import pytest

from tests.cli.test_help import TRAIN
from tfdml.cli.sizes import byte_size, whole_numbers

SCRIPT = """
import sys
import keras, numpy as np, tfdml
from helper import width

print("before", sys.argv[1:], __name__)
strategy = tfdml.HorovodStrategy(compression="onebit")
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.zeros((1000, width))
model.fit(x, x[:, :1], batch_size=int(sys.argv[1]))
print("after")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("width = 32\n")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_a_script_runs_until_its_first_fit(tfdml_command, tmp_path, script):
    found, plot = tmp_path / "memory.json", tmp_path / "memory.png"
    done = tfdml_command(
        "estimate-memory", "--ranks", "1,2", "--memory", "200KB", "--json", str(found),
        "--plot", str(plot), str(script), "256", "--anything",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "before ['256', '--anything'] __main__" in done.stdout
    assert "after" not in done.stdout
    assert "global batch of 256" in done.stdout
    report = json.loads(found.read_text())
    assert report["batch_size"] == 256
    one, *_, two = (c for c in report["choices"] if not c["checkpointing"])
    assert one["weights"] == 4 * (32 * 64 + 64 + 64 + 1)
    # The codec is that of the script's strategy.
    assert (one["residuals"], one["ranks"], two["ranks"]) == (0, 1, 2)
    assert two["residuals"] > 4 * 32 * 64
    assert "The first that fits into 200KB: 1 rank" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_nothing_fits(tfdml_command, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = tfdml_command("estimate-memory", "--memory", "10B", str(tmp_path / "train.py"))
    assert done.returncode == 1
    assert "None of these fits into 10B" in done.stdout
    assert not (tmp_path / "run1").exists()
    assert "global batch of 4:" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("print('nothing')", "SCRIPT must call `fit`", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(3)", "exit code 3", marks=pytest.mark.slow),
        ("import keras; m = keras.Sequential(); m.fit([1.0])", "`fit` must get arrays"),
    ],
)
def test_scripts_that_cannot_be_estimated(tfdml_command, tmp_path, text, message):
    (tmp_path / "train.py").write_text(text)
    done = tfdml_command("estimate-memory", str(tmp_path / "train.py"))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_wrong_options_are_found_before_anything_runs(tfdml_command, tmp_path, script):
    for options, message in (
        (["--memory", "much"], "`--memory` must be a size, such as 16GB"),
        (["--ranks", "0"], "`--ranks` must be positive numbers"),
        (["--plot", str(tmp_path / "nowhere" / "a.png")], "`--plot` must be in a directory"),
    ):
        done = tfdml_command("estimate-memory", *options, str(script))
        assert done.returncode == 2
        assert message in done.stderr
        assert "before" not in done.stdout
    done = tfdml_command("estimate-memory", str(tmp_path / "other.py"))
    assert done.returncode == 2
    assert "other.py, which does not exist" in done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GB", 16 * 10**9), ("1.5 GiB", 3 * 2**29), ("2m", None), ("512", 512), ("-1GB", None)],
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(ValueError, match="must be a size"):
            byte_size(text, "--memory")
    else:
        assert byte_size(text, "--memory") == size


def test_numbers():
    assert whole_numbers("1, 2,4", "--ranks") == [1, 2, 4]
    with pytest.raises(ValueError, match="`--ranks` must be positive numbers"):
        whole_numbers("1,,2", "--ranks")
