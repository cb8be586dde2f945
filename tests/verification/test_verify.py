"""Runs `tfdml verify` on real scripts: each planted mistake is found and named, none elsewhere."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("planted_program.py")

# Each mistake of the program: kind and name of the first tensor that differs, and the cause.
PLANTED = {
    "BatchNormalization": ("output", "planted", "BatchNormalization"),
    "Dropout": ("output", "planted", "Dropout"),
    "noise": ("output", "planted", "random layer"),
    "batch_size": ("output", "planted", "batch-size layer"),
    "rank": ("output", "planted", "branch on rank"),
    "shuffle": ("rows", "batch", "shuffle"),
    "augmentation": ("rows", "batch", "augmentation"),
    "batch": ("rows", "batch", "batch multiplied by size"),
    "summed_loss": ("loss", "summed_squares", "summed loss"),
    "repeated_rows": ("rows", "batch", "same rows on several ranks"),
    "clipped": ("gradient", "conv2d/kernel", "gradient of a replica"),
    "repeated_ids": ("gradient", "planted/embedding/embeddings", "repeated embedding rows"),
    "rate": ("learning rate", "adam", "rate multiplied by size"),
}
# Mistakes that tfdml refuses on several processes.
REFUSED = {
    "shard": "Dataset.shard",
    "shuffle_by_rank": "data by rank",
    "augmentation_by_rank": "data by rank",
}
QUICK = ("BatchNormalization",)


@pytest.fixture
def verify(tfdml_command, tmp_path):
    """Returns a function that verifies a script, and returns the command and its answer."""

    def run(script, *arguments, options=()):
        file = tmp_path / "answer.json"
        given = ("--steps", "2", "--json", str(file), *options)
        done = tfdml_command("verify", *given, str(script), *arguments, timeout=300)
        return done, json.loads(file.read_text()) if file.exists() else done.stderr

    return run


def test_a_right_script_is_silent(verify):
    """Synchronized BatchNormalization, Dropout without a seed and initializers without one."""
    done, answer = verify(PROGRAM, "none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert answer["same"]
    assert (answer["replicas"], answer["steps"], answer["first_difference"]) == (2, 2, None)
    assert answer["tensors"] > 50
    assert "trains as one does" in done.stdout


@pytest.mark.parametrize(
    "mistake",
    [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in PLANTED],
)
def test_a_planted_mistake_is_found_at_its_tensor(verify, mistake):
    kind, name, cause = PLANTED[mistake]
    done, answer = verify(PROGRAM, mistake)
    assert done.returncode == 1, done.stdout + done.stderr
    found = answer["first_difference"]
    assert (found["step"], found["kind"], found["name"]) == (1, kind, name)
    assert answer["cause"]["name"] == cause
    assert answer["cause"]["fix"] in done.stdout


@pytest.mark.slow
def test_a_rank_with_fewer_rows_is_found_where_they_end(verify):
    done, answer = verify(PROGRAM, "uneven")
    assert done.returncode == 1, done.stdout + done.stderr
    found = answer["first_difference"]
    assert (found["step"], found["kind"], answer["cause"]["name"]) == (2, "rows", "uneven data")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "replicas"), [("none", "3"), ("own_part", "2")])
def test_float64_and_rows_that_ranks_read_in_turn_are_silent(verify, script, replicas):
    done, answer = verify(PROGRAM, script, options=("--float64", "-n", replicas))
    assert done.returncode == 0, done.stdout + done.stderr
    assert answer["replicas"] == int(replicas)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", REFUSED)
def test_what_tfdml_refuses_is_named(verify, mistake):
    done, answer = verify(PROGRAM, mistake)
    assert done.returncode == 1, done.stdout + done.stderr
    assert answer["cause"]["name"] == REFUSED[mistake]
    assert "assertion failed" not in done.stdout
    assert "Received " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import tfdml\ntfdml.MultiWorkerMirroredStrategy()\n", ["must call `fit`"]),
        ("raise KeyError('here')\n", ["must run on one process", "KeyError: 'here'"]),
    ],
)
def test_a_script_that_does_not_train_on_one_process_is_refused(verify, tmp_path, text, wanted):
    script = tmp_path / "train.py"
    script.write_text(text)
    done, words = verify(script)
    assert done.returncode == 2
    assert all(w in words for w in wanted), words


@pytest.mark.slow
def test_compressed_updates_are_compared_with_uncompressed_ones(verify, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(COMPRESSED)
    done, answer = verify(script, options=("--against", "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    updates = {update["name"]: update for update in answer["updates"]}
    layers = ("wide/kernel", "wide/bias", "last/kernel", "last/bias")
    assert set(updates) == {f"sequential/{name}" for name in layers}
    wide = updates["sequential/wide/kernel"]
    # TopK(0.1) sends a tenth of the largest gradients: the rest comes later.
    assert 0.1 < wide["first"] < 1
    assert wide["cosine"] > 0.3
    assert "wide/kernel" in done.stdout


COMPRESSED = """
import keras, numpy as np, tfdml

strategy = tfdml.MultiWorkerMirroredStrategy(compression=tfdml.compression.TopK(0.1))
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, name="wide"),
                              keras.layers.Dense(1, name="last")])
    model.compile(keras.optimizers.SGD(0.01), "mse")
x = np.random.default_rng(0).normal(size=(256, 64)).astype("float32")
model.fit(x, x[:, :1], batch_size=32)
"""


MIRRORED = """
import keras, numpy as np, tfdml

strategy = tfdml.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32), NORMALIZATION])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(256, 64)).astype("float32")
model.fit(x, x[:, :32], batch_size=33)
"""


@pytest.mark.slow
@pytest.mark.parametrize("synchronized", [True, False])
def test_devices_of_a_mirrored_strategy_are_compared_with_one(verify, tmp_path, synchronized):
    script = tmp_path / "train.py"
    layer = f"keras.layers.BatchNormalization(synchronized={synchronized}, name='norm')"
    script.write_text(MIRRORED.replace("NORMALIZATION", layer))
    done, answer = verify(script, options=("-n", "3"))
    assert done.returncode == (0 if synchronized else 1), done.stdout + done.stderr
    assert answer["replicas"] == 3
    if not synchronized:
        assert answer["first_difference"]["name"] == "norm"
