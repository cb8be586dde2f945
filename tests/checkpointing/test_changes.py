"""Checks interrupted notebooks, and programs that have changed since their checkpoint."""

import contextlib
import errno
import json
import os

import keras
import numpy as np
import pytest

import tfdml
from tests.harness import rank_job
from tests.harness.command import run_python
from tests.harness.pool import RankFailure
from tfdml.callbacks.checkpoint.layout import layout_changes
from tfdml.checkpointing import CheckpointDirectory, Files

PROGRAM = os.path.join(os.path.dirname(__file__), "notebook_program.py")


@pytest.mark.parametrize(
    ("second", "step"), [("same", 20), pytest.param("rebuilt", 20, marks=pytest.mark.slow)]
)
def test_an_interrupted_cell_resumes_when_it_is_run_again(tmp_path, second, step):
    """With the bits of a run that was not interrupted, and eight steps an epoch."""
    done = run_python(PROGRAM, str(tmp_path), second, str(step))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"epochs": [0, 1, 2], "same": True, "trained": 48}
    assert "epoch 2 continues at step 0, from" in done.stderr


@pytest.mark.slow
def test_a_cell_that_was_interrupted_before_its_first_checkpoint_says_so(tmp_path):
    done = run_python(PROGRAM, str(tmp_path), "rebuilt", "4")
    assert json.loads(done.stdout.splitlines()[-1])["same"]
    assert "the interrupted fit had saved nothing in" in done.stderr
    assert "epoch 0 begins again, with the weights that the model has now" in done.stderr


def build(kind: str, rate: float, optimizer: str) -> keras.Model:
    if kind == "functional":
        inputs = keras.Input((4,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    elif kind == "subclassed":
        model = Subclassed()
    elif kind == "named":
        layers = [keras.layers.Dense(4, name=f"block_{i}") for i in (2, 1)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    else:
        layers = [keras.layers.Dense(4, name=f"block_{i}") for i in (1, 2)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    made = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}[optimizer](rate)
    model.compile(made, "mse")
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8), keras.layers.Dense(3)

    def call(self, inputs):
        return self.second(self.first(inputs))


def train(
    directory: str,
    kind: str = "sequential",
    *,
    before: int = 0,
    epochs: int = 2,
    batch: int = 8,
    rate: float = 0.01,
    optimizer: str = "adam",
    stop_after: int | None = None,
    strategy: bool = False,
    **options,
) -> dict:
    """Trains in a new "kernel", in which `before` such models were built; returns the outcome."""
    keras.utils.clear_session()
    for _ in range(before):
        build(kind, rate, optimizer).build((None, 4))
    keras.utils.set_random_seed(3)
    with rank_job.strategy().scope() if strategy else contextlib.nullcontext():
        model = build(kind, rate, optimizer)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    steps = []

    def end(batch, logs):
        steps.append(batch)
        if len(steps) == stop_after:
            raise RuntimeError("ended")

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=end),
        tfdml.callbacks.FaultTolerantCheckpoint(directory, **{"save_freq": 2, **options}),
    ]
    try:
        history = model.fit(
            x, x[:, :3], batch_size=batch, epochs=epochs, verbose=0, callbacks=callbacks
        )
        seen = history.epoch
    except RuntimeError as error:
        if str(error) != "ended":
            raise
        seen = None
    tfdml.callbacks.checkpoint.directory_use.leave_directory(directory)
    return {
        "epochs": seen,
        "steps": steps,
        "trained": int(model.optimizer.iterations.numpy()),
        "rate": float(np.asarray(model.optimizer.learning_rate)),
        "weights": [w.tobytes() for w in model.get_weights()],
    }


def run(ranks, size: int, *arguments, **keywords) -> list[dict]:
    return ranks(size).run(train_with, arguments, keywords)


def train_with(arguments: tuple, keywords: dict) -> dict:
    return train(*arguments, **keywords)


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("sequential", "functional")),
        "subclassed",
    ],
)
def test_automatic_names_do_not_matter(ranks, tmp_path, kind):
    """The first kernel has built the model four times, as a notebook does."""
    (whole,) = run(ranks, 1, str(tmp_path / "whole"), kind, epochs=4)
    run(ranks, 1, str(tmp_path / "parts"), kind, before=3)
    (resumed,) = run(ranks, 1, str(tmp_path / "parts"), kind, epochs=4)
    assert resumed["weights"] == whole["weights"]
    assert resumed["trained"] == 32


def layout(*names: str) -> dict:
    return {"variables": {"model": [[n, [4, 4], "float32"] for n in names]}, "optimizers": {}}


def test_numbers_of_names_count_by_their_order():
    def changes(now, saved):
        return layout_changes(layout(*now), layout(*saved))

    assert changes(["m/dense/k", "m/dense_1/k"], ["m_6/dense_12/k", "m_6/dense_13/k"]) == []
    assert changes(["dense_1/k", "dense/k"], ["dense_7/k", "dense_5/k"]) == []
    (change,) = changes(["block_2/k", "block_1/k"], ["block_1/k", "block_2/k"])
    assert change.what == "other names, block_2/k, before block_1/k"
    assert change.fits
    (change,) = changes(["a/k"], ["b/k"])
    assert not change.fits


def test_layers_in_another_order_are_refused(ranks, tmp_path):
    """Their shapes are equal: only the names tell that weights would be exchanged."""
    run(ranks, 1, str(tmp_path))
    with pytest.raises(RankFailure, match="other names, .*block_2/kernel, before .*block_1/kernel"):
        run(ranks, 1, str(tmp_path), "named", epochs=3)


def test_a_changed_learning_rate_is_accepted_on_purpose(ranks, tmp_path):
    run(ranks, 1, str(tmp_path))
    with pytest.raises(RankFailure, match='learning_rate=0.02, before 0.01.*on_change="accept"'):
        run(ranks, 1, str(tmp_path), rate=0.02, epochs=3)
    (one,) = run(ranks, 1, str(tmp_path), rate=0.02, epochs=3, on_change="accept")
    assert (one["trained"], round(one["rate"], 6)) == (24, 0.02)
    # The change is in the next checkpoint, so it need not be accepted twice.
    (two,) = run(ranks, 1, str(tmp_path), rate=0.02, epochs=4)
    assert (two["trained"], round(two["rate"], 6)) == (32, 0.02)


def test_another_optimizer_begins_without_its_state(ranks, tmp_path):
    (first,) = run(ranks, 1, str(tmp_path))
    (same,) = run(ranks, 1, str(tmp_path), optimizer="sgd", on_change="accept")
    assert same["weights"] == first["weights"]
    (more,) = run(ranks, 1, str(tmp_path), optimizer="sgd", epochs=3, on_change="accept")
    assert (more["epochs"], more["trained"]) == ([0, 1, 2], 8)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_batch_size_begins_the_epoch_again(ranks, tmp_path, size):
    directory, strategy = str(tmp_path), {"strategy": size > 1}
    ended = run(ranks, size, directory, stop_after=12, **strategy)
    assert [len(e["steps"]) for e in ended] == [12] * size
    with pytest.raises(RankFailure, match='batches 4, before 8.*on_change="accept"'):
        run(ranks, size, directory, batch=16, **strategy)
    results = run(ranks, size, directory, batch=16, on_change="accept", epochs=3, **strategy)
    for result in results:
        # Epoch 0 had eight steps, and epoch 1 four of eight: now all four of it, and of epoch 2.
        assert result["steps"] == [*range(4), *range(4)]
        assert result["epochs"] == [0, 1, 2]


def test_fewer_epochs_than_are_trained_are_no_error(ranks, tmp_path):
    (whole,) = run(ranks, 1, str(tmp_path), epochs=3)
    (fewer,) = run(ranks, 1, str(tmp_path), epochs=1)
    assert fewer["steps"] == []
    assert fewer["weights"] == whole["weights"]


def train_beside_another_job(directory: str) -> dict:
    """Fails while another job has the directory; then trains, in the same session."""
    other = CheckpointDirectory(directory, Files(), print)
    other.claim()
    checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(directory)
    model = build("sequential", 0.01, "adam")
    x = np.zeros((64, 4), "float32")
    with pytest.raises(RuntimeError, match="must be used by one job at a time"):
        model.fit(x, x[:, :3], batch_size=8, epochs=3, verbose=0, callbacks=[checkpoint])
    other.release()
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(0))
    callbacks = [count, checkpoint]
    model.fit(x, x[:, :3], batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    tfdml.callbacks.checkpoint.directory_use.leave_directory(directory)
    return {"trained": int(model.optimizer.iterations.numpy()), "steps": len(steps)}


def test_a_fit_that_was_refused_counts_as_none(ranks, tmp_path):
    """The next one resumes after the two epochs of eight steps that are there."""
    run(ranks, 1, str(tmp_path), "sequential")
    (result,) = ranks(1).run(train_beside_another_job, str(tmp_path))
    assert result == {"trained": 24, "steps": 8}


def train_on_a_full_disk(directory: str, arguments: dict) -> dict:
    tfdml.callbacks.checkpoint.directory_use.use_directory(directory).files = Full()
    return train(directory, **arguments)


class Full(Files):
    """Pretends that the disk has no room for a checkpoint."""

    def create(self, path):
        if "partial-" in path:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return super().create(path)


def test_a_disk_that_is_full_at_the_first_save(ranks, tmp_path):
    """There are no earlier checkpoints of which a message could speak."""
    message = "No space left.*This training has no earlier checkpoint"
    with pytest.raises(RankFailure, match=message):
        ranks(1).run(train_on_a_full_disk, str(tmp_path / "first"), {})
    run(ranks, 1, str(tmp_path / "later"))
    with pytest.raises(RankFailure, match="No space left.*Earlier checkpoints are undamaged"):
        ranks(1).run(train_on_a_full_disk, str(tmp_path / "later"), {"epochs": 3})


def test_wrong_arguments(tmp_path):
    make = tfdml.callbacks.FaultTolerantCheckpoint
    with pytest.raises(ValueError, match="`keep_best` must be a name .* The number of .*max_to_k"):
        make(str(tmp_path), keep_best=2)
    with pytest.raises(ValueError, match="`on_change` must be one of .*'accept'.*'yes'"):
        make(str(tmp_path), on_change="yes")
