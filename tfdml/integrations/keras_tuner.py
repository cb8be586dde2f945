"""KerasTuner's tuners on several processes: rank 0 has the search, and all ranks train its trials.

```python
from tfdml.integrations import keras_tuner

tuner = keras_tuner.RandomSearch(build_model, "val_loss", distribution_strategy=strategy)
```

KerasTuner asks a strategy's `extended._in_multi_worker_mode()` whether it spans processes. tfdml's
answer no, because TensorFlow's input code asks the same for workers whose own inputs end at
different times (docs/tuning.md), and KerasTuner would give each rank an oracle of its own anyway.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import tensorflow as tf
from keras_tuner.engine.trial import Trial
from keras_tuner.src.engine.tuner_utils import SaveBestEpoch

from tfdml.collectives.texts import gather_texts
from tfdml.runtime.errors import OtherRankError
from tfdml.strategies.replica_strategy import ReplicaStrategy


class SharedTrials:
    """Makes all ranks of a job train the same trials of a tuner, whose search is on rank 0.

    A base class for tuners of your own, before KerasTuner's:
    `class MyTuner(SharedTrials, keras_tuner.RandomSearch)`.

    Rank 0 runs the oracle and has the files in `directory`. The other ranks get its trials and
    results, so any rank may read `results_summary`, `get_best_hyperparameters` and `oracle`. Call
    `search` and `get_best_models` on all ranks. A trial that fails outside of `fit` on one rank
    fails on all; a rank that alone leaves a `fit` with an error ends the job.

    Args:
        *args: Arguments of the tuner.
        distribution_strategy: A synchronous strategy of tfdml, in whose scope models are built.
        directory: Directory for the search's files, which only rank 0 needs to see.
        **kwargs: Arguments of the tuner.

    Raises:
        ValueError: If `distribution_strategy` is not a synchronous strategy of tfdml.
    """

    def __init__(
        self,
        *args: Any,
        distribution_strategy: tf.distribute.Strategy,
        directory: str | os.PathLike | None = None,
        **kwargs: Any,
    ):
        strategy = distribution_strategy
        if not isinstance(strategy, ReplicaStrategy):
            raise ValueError(
                f"`distribution_strategy` must be a synchronous strategy of tfdml, such as "
                f"`tfdml.HorovodStrategy()`, whose ranks train trials together. Received: "
                f"distribution_strategy={strategy!r}. With another one, use `keras_tuner` itself."
            )
        if not strategy.is_chief:
            self._own_files = tempfile.TemporaryDirectory(prefix="tfdml-tuner-")
            directory = self._own_files.name
        # A new search builds models here, and one that goes on does not: neither waits for others.
        with strategy.extended.making_own_variables():
            super().__init__(*args, distribution_strategy=strategy, directory=directory, **kwargs)
        if strategy.size > 1:
            self.oracle = _SharedOracle(self.oracle, strategy)

    def _build_and_fit_model(self, trial, *args, **kwargs):
        strategy = self.distribution_strategy
        # Of divided slots and tables, rank 0 asks all ranks for their parts.
        if not strategy.is_chief and strategy.extended.options.sharding is None:
            callbacks = kwargs["callbacks"]
            kwargs["callbacks"] = [c for c in callbacks if not isinstance(c, SaveBestEpoch)]
        return super()._build_and_fit_model(trial, *args, **kwargs)

    def load_model(self, trial: Trial) -> keras.Model:
        """Returns a trial's model with its best weights; all ranks call this."""
        with self._files_of(trial.trial_id):
            return super().load_model(trial)

    def _build_hypermodel(self, hp):
        # Hyperband goes on with the weights of an earlier trial.
        with self._files_of(hp.values.get("tuner/trial_id")):
            return super()._build_hypermodel(hp)

    @contextlib.contextmanager
    def _files_of(self, trial_id: str | None) -> Iterator[None]:
        """Context manager: the other ranks have copies of rank 0's files of a trial."""
        strategy, copies = self.distribution_strategy, {}
        if trial_id is not None and strategy.size > 1:
            directory = self.get_trial_dir(trial_id)
            files = strategy.call_on_chief(lambda: _read_files(directory))
            if not strategy.is_chief:
                copies = {Path(directory, name): content for name, content in files.items()}
        for path, content in copies.items():
            path.write_bytes(content)
        yield
        for path in copies:
            path.unlink()


def _read_files(directory: str) -> dict[str, bytes]:
    names = [n for n in tf.io.gfile.listdir(directory) if not n.endswith("/")]
    return {n: tf.io.gfile.GFile(os.path.join(directory, n), "rb").read() for n in names}


class _SharedOracle:
    """Oracle of rank 0, which all ranks ask and tell together.

    What it knows of trials is copied to the other ranks' oracles, so that reading needs no others.

    Args:
        oracle: This rank's oracle, made alike on all ranks; that of rank 0 counts.
        strategy: Strategy of several processes.
    """

    def __init__(self, oracle: keras_tuner.Oracle, strategy: ReplicaStrategy):
        self._own, self._strategy = oracle, strategy
        self._on_rank_0(lambda: list(getattr(oracle, "trials", {}).values()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    verbose = property(
        lambda self: self._own.verbose, lambda self, value: setattr(self._own, "verbose", value)
    )

    def create_trial(self, tuner_id: str) -> Trial:
        """Returns the next trial, the same on all ranks."""
        self._agree("create_trial")
        return self._on_rank_0(lambda: [self._own.create_trial(tuner_id)])[0]

    def update_trial(self, trial_id: str, metrics: dict[str, float], step: int = 0) -> Trial:
        """Reports rank 0's metrics of a trial."""
        self._agree("update_trial")
        return self._on_rank_0(lambda: [self._own.update_trial(trial_id, metrics, step=step)])[0]

    def end_trial(self, trial: Trial) -> None:
        """Ends a trial, which has failed if it has on any rank."""
        failure = self._agree("end_trial", trial)
        if failure and trial.status == "COMPLETED":
            trial.status, trial.message = failure["status"], failure["message"]

        def end() -> list[Trial]:
            self._own.end_trial(trial)
            return [self._own.get_trial(trial.trial_id)]

        self._on_rank_0(end)

    def save(self) -> None:
        """Saves the search on rank 0."""
        if self._strategy.is_chief:
            self._own.save()

    def _agree(self, call: str, trial: Trial | None = None) -> dict[str, str] | None:
        """Waits until all ranks make the same call; returns what the first failed one says."""
        status = trial.status if trial is not None and trial.status != "COMPLETED" else None
        message = f"On rank {self._strategy.rank}: {trial.message}" if status else ""
        own = {"call": call, "status": status, "message": message}
        while True:
            texts = gather_texts(self._strategy.extended.collective, json.dumps(own), "oracle")
            ranks = [json.loads(text) for text in texts]
            calls = [rank["call"] for rank in ranks]
            failure = next((rank for rank in ranks if rank["status"]), None)
            if len(set(calls)) == 1:
                return failure
            if failure is None:
                raise RuntimeError(
                    f"All ranks must make the same calls of an oracle. Received: {calls}, by rank. "
                    f"Call it on all ranks, or on none."
                )
            # A rank that has failed waits here until the others have failed, too.
            if status is None:
                raise OtherRankError(failure["message"])

    def _on_rank_0(self, call: Callable[[], list[Trial]]) -> list[Trial]:
        """Makes a call on rank 0; returns the trials that it returns, which all ranks keep."""
        trials, space = self._strategy.call_on_chief(lambda: (call(), self._own.get_space()))
        if not self._strategy.is_chief:
            self._own.hyperparameters = space
            begun = {t.trial_id: t for t in trials if t.status not in ("IDLE", "STOPPED")}
            getattr(self._own, "trials", {}).update(begun)
        return trials


class RandomSearch(SharedTrials, keras_tuner.RandomSearch):
    """`keras_tuner.RandomSearch` whose trials all ranks train; see `SharedTrials`."""


class GridSearch(SharedTrials, keras_tuner.GridSearch):
    """`keras_tuner.GridSearch` whose trials all ranks train; see `SharedTrials`."""


class BayesianOptimization(SharedTrials, keras_tuner.BayesianOptimization):
    """`keras_tuner.BayesianOptimization` whose trials all ranks train; see `SharedTrials`."""


class Hyperband(SharedTrials, keras_tuner.Hyperband):
    """`keras_tuner.Hyperband` whose trials all ranks train; see `SharedTrials`."""
