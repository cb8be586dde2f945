"""Searches with KerasTuner on each rank, as a script of a user's would, and writes what it sees.

Arguments: a directory for files and reports, then the searches, such as `random:3`.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tests.harness import rank_job
from tfdml.integrations import keras_tuner

ROWS = 64


def build(hp) -> keras.Model:
    """Returns a model whose size and rate are searched."""
    units = hp.Int("units", 2, 16, step=2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu")])
    model.add(keras.layers.Dense(1))
    rate = hp.Float("rate", 1e-3, 1e-1, sampling="log")
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def build_some(hp) -> keras.Model:
    """Returns the same; some models cannot be built."""
    if hp.Boolean("impossible"):
        raise ValueError("no such model")
    return build(hp)


class FailsOnRank1(keras_tuner.RandomSearch):
    """Search whose third trial fails on rank 1 after `fit`, the fourth after reporting its loss."""

    def run_trial(self, trial, *args, **kwargs):
        """Trains, and fails on rank 1."""
        result = super().run_trial(trial, *args, **kwargs)
        if trial.trial_id == "3":
            self.oracle.update_trial(trial.trial_id, {"val_loss": 1e-9})
        if trial.trial_id in ("2", "3") and self.distribution_strategy.rank == 1:
            raise FileNotFoundError("no disk here")
        return result


def search(kind: str, trials: int, strategy: tf.distribute.Strategy, home: Path) -> dict:
    """Searches, and returns what this rank knows then.

    Args:
        kind: "random", "failing", whose trials fail in several ways, or "hyperband".
        trials: Number of trials, or of hyperband's epochs.
        strategy: The strategy.
        home: Directory in which the search's files are.
    """
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    common = {
        "objective": "val_loss",
        "seed": 3,
        "distribution_strategy": strategy,
        "directory": home / "search",
        "project_name": kind,
        "hypermodel": build if kind != "failing" else build_some,
    }
    if kind == "hyperband":
        tuner = keras_tuner.Hyperband(max_epochs=trials, factor=3, **common)
    else:
        tuner_class = FailsOnRank1 if kind == "failing" else keras_tuner.RandomSearch
        tuner = tuner_class(max_trials=trials, max_consecutive_failed_trials=9, **common)
    tuner.search(x, y, batch_size=24, epochs=2, validation_data=(x, y), verbose=0)
    (best,) = tuner.get_best_models(1)
    if strategy.is_chief:
        tuner.results_summary()  # Reading needs no other rank.
    return {
        "trials": {
            name: [trial.status, trial.hyperparameters.values, trial.score, trial.message]
            for name, trial in tuner.oracle.trials.items()
        },
        "best": tuner.get_best_hyperparameters()[0].values,
        "weights": [w.tolist() for w in best.get_weights()],
        "loss": best.evaluate(x, y, verbose=0),
        "remaining": tuner.remaining_trials,
        "files": sorted(str(p.relative_to(tuner.directory)) for p in _files(tuner.directory)),
    }


def _files(directory: str | Path) -> list[Path]:
    return [path for path in Path(directory).rglob("*") if path.is_file()]


def main(home: Path, *searches: str) -> None:
    """Runs searches one after another, and writes a report on each."""
    strategy = rank_job.strategy()
    for number, one in enumerate(searches):
        kind, _, trials = one.partition(":")
        report = search(kind, int(trials), strategy, home)
        (home / f"{number}-rank{strategy.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
