"""Checks `tfdml checkpoints` and `tfdml chaos` as processes."""

import keras
import numpy as np
import pytest

from tests.harness.command import run_python

PROGRAM = """
import sys
import keras, numpy as np, tfdml
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.1)])
model.compile("adam", "mse")
x = np.arange(80, dtype="float32").reshape(20, 4) / 80
checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(sys.argv[1], save_freq=2)
model.fit(x, x[:, :3], batch_size=4, epochs=2, verbose=0, callbacks=[checkpoint])
np.save(sys.argv[1] + ".npy", model.layers[0].kernel.numpy())
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "run"
    done = run_python("-c", PROGRAM, str(directory))
    assert done.returncode == 0, done.stderr
    return directory


def test_inspect(tfdml_command, saved):
    done = tfdml_command("checkpoints", "inspect", str(saved), COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    (last,) = [line for line in lines if line[:1] == ["fit-000-epoch-0002-step-0000000010"]]
    assert last[1] == "1"
    assert last[-1] == "finished"
    assert ["Inside", "fit-000-epoch-0002-step-0000000010", "Tensors", "MB"] in lines
    for group in ("model", "optimizer", "metrics", "rank/random"):
        assert group in done.stdout


def test_inspect_in_a_store(tfdml_command, saved):
    done = tfdml_command("checkpoints", "inspect", f"file://{saved}", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "fit-000-epoch-0002-step-0000000010" in done.stdout


def test_export(tfdml_command, saved, tmp_path):
    target = tmp_path / "model.keras"
    done = tfdml_command("checkpoints", "export", str(saved), str(target))
    assert done.returncode == 0, done.stderr
    script = "import sys, keras, numpy as np; m = keras.models.load_model(sys.argv[1]); "
    script += "print(bool((m.layers[0].kernel.numpy() == np.load(sys.argv[2])).all()))"
    done = run_python("-c", script, str(target), f"{saved}.npy")
    assert done.stdout.strip() == "True", done.stderr
    assert np.load(f"{saved}.npy").shape == (4, 3)


@pytest.mark.slow
def test_export_of_weights_and_wrong_outputs(tfdml_command, saved, tmp_path):
    output = tmp_path / "model.weights.h5"
    assert tfdml_command("checkpoints", "export", str(saved), str(output)).returncode == 0
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.1)])
    model.load_weights(output)
    assert (model.layers[0].kernel.numpy() == np.load(f"{saved}.npy")).all()
    for name, message in (
        ("k.h5", "`output` must end in .keras or .weights.h5. Received: "),
        ("none/k.keras", "`output` must be in a directory that exists. Received: "),
    ):
        done = tfdml_command("checkpoints", "export", str(saved), str(tmp_path / name))
        assert done.returncode == 1
        assert message in done.stderr
        assert not (tmp_path / name).exists()


def test_damage_is_named(tfdml_command, saved):
    newest = sorted(saved.glob("fit-*"))[-1]
    member = newest / "rank-00000-of-00001.safetensors"
    content = member.read_bytes()
    member.write_bytes(content[:-1])
    done = tfdml_command("checkpoints", "inspect", str(saved), COLUMNS="200")
    member.write_bytes(content)
    assert done.returncode == 1
    assert f"damaged: {member} has {len(content) - 1} bytes" in done.stdout


def test_no_checkpoints(tfdml_command, tmp_path):
    done = tfdml_command("checkpoints", "inspect", str(tmp_path))
    assert done.returncode == 2
    assert "must have checkpoints" in done.stderr
    (tmp_path / "file").write_text("")
    done = tfdml_command("checkpoints", "inspect", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "must have checkpoints" in done.stderr


@pytest.mark.slow
def test_chaos(tfdml_command, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    arguments = ("chaos", "--faults", "12", "--seed", "4", "--", "python", str(program))
    done = tfdml_command(*arguments, str(tmp_path / "run"), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 runs lost" in done.stdout
