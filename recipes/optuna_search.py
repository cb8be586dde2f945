"""Searches a learning rate and a network's size with Optuna; all ranks train each trial together.

    pip install optuna
    tfdml launch --workers 2 recipes/optuna_search.py --trials 8
    tfdml launch --workers 2 recipes/optuna_search.py --storage sqlite:///search.db   # goes on

Rank 0 has the study: it suggests values, sees results and decides which trials end early. The other
ranks get its answers by `strategy.call_on_chief`, so that all build the same model and stop after
the same epoch. An error that all ranks have, such as a layer of the wrong size, ends the search.
"""

from typing import Annotated, Any

import images
import keras
import optuna
import typer

import tfdml


class SharedStudy:
    """Study on rank 0 whose trials all ranks train; all ranks call its methods together.

    Args:
        strategy: The strategy, by which rank 0's answers reach the other ranks.
        options: Arguments of `optuna.create_study`.
    """

    def __init__(self, strategy: tfdml.MultiWorkerMirroredStrategy, options: dict[str, Any]):
        self._call_on_chief = strategy.call_on_chief
        self._options = options
        # On rank 0 alone.
        self._study: optuna.Study
        self._trial: optuna.Trial
        self._call_on_chief(self._open)

    def _open(self) -> None:
        self._study = optuna.create_study(**self._options)

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Begins a trial; returns its number and its values."""
        return self._call_on_chief(self._ask)

    def _ask(self) -> tuple[int, dict[str, Any]]:
        self._trial = self._study.ask()
        values = {
            "rate": self._trial.suggest_float("rate", 1e-4, 1e-1, log=True),
            "units": self._trial.suggest_int("units", 16, 128, log=True),
            "optimizer": self._trial.suggest_categorical("optimizer", ["sgd", "adam"]),
        }
        return self._trial.number, values

    def should_prune(self, epoch: int, value: float) -> bool:
        """Reports a value of the trial; returns whether the trial should end."""
        return self._call_on_chief(lambda: self._report(epoch, value))

    def _report(self, epoch: int, value: float) -> bool:
        self._trial.report(value, epoch)
        return self._trial.should_prune()

    def tell(self, value: float, pruned: bool) -> None:
        """Ends the trial."""
        pruned_state = optuna.trial.TrialState.PRUNED
        complete = optuna.trial.TrialState.COMPLETE
        state, result = (pruned_state, None) if pruned else (complete, value)
        self._call_on_chief(lambda: self._study.tell(self._trial, result, state) and None)

    def best(self) -> tuple[int, float, dict[str, Any]]:
        """Returns number, value and parameters of the best trial."""
        return self._call_on_chief(
            lambda: (
                self._study.best_trial.number,
                self._study.best_value,
                self._study.best_params,
            )
        )


class Pruning(keras.callbacks.Callback):
    """Callback that ends a trial whose validation accuracy is worse than that of most others.

    Args:
        study: The study.

    Attributes:
        pruned: Whether it has ended the trial.
    """

    def __init__(self, study: SharedStudy):
        super().__init__()
        self._study = study
        self.pruned = False

    def on_epoch_end(self, epoch, logs=None):
        """Asks rank 0 whether to go on."""
        self.pruned = self._study.should_prune(epoch, logs["val_accuracy"])
        self.model.stop_training = self.pruned


def build_model(shape: tuple[int, ...], values: dict[str, Any]) -> keras.Model:
    """Returns a compiled network.

    Args:
        shape: Shape of one image: height, width, channels.
        values: The trial's values.
    """
    model = keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            keras.layers.Dense(values["units"], activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.get(values["optimizer"])
    optimizer.learning_rate = values["rate"]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def main(
    trials: Annotated[int, typer.Option(min=1, help="Trials of this search.")] = 8,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images in a trial.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 64,
    storage: Annotated[
        str | None, typer.Option(help="Database in which rank 0 keeps the study, as a URL.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search and of each trial.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first images.")] = None,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
) -> None:
    """Search for good values; each trial is trained by all ranks."""
    strategy = tfdml.MultiWorkerMirroredStrategy()
    dataset = images.load_or_exit(data, limit)
    options = {
        "study_name": "images",
        "storage": storage,
        "load_if_exists": True,
        "direction": "maximize",
        "sampler": optuna.samplers.TPESampler(seed=seed),
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=3),
    }
    study = SharedStudy(strategy, options)
    for _ in range(trials):
        number, values = study.ask()
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            model = build_model(dataset.x.shape[1:], values)
        pruning = Pruning(study)
        history = model.fit(
            dataset.x,
            dataset.y,
            batch_size=batch_size,
            epochs=epochs,
            validation_data=(dataset.x_val, dataset.y_val),
            callbacks=[pruning],
            verbose=0,
        ).history
        accuracy = history["val_accuracy"][-1]
        study.tell(accuracy, pruning.pruned)
        ended = f"pruned after epoch {len(history['loss'])}" if pruning.pruned else "complete"
        typer.echo(
            f"rank {strategy.rank}: trial {number}, {ended}, validation accuracy {accuracy:.4f}, "
            f"{model.count_params()} weights"
        )
    number, accuracy, values = study.best()
    typer.echo(f"rank {strategy.rank}: best is trial {number} with {accuracy:.4f}, {values}")


if __name__ == "__main__":
    typer.run(main)
