"""Cases of models in stages that are saved, resumed, loaded, and used in any order."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfdml
from tests.strategies.pipeline import cases
from tfdml.callbacks.checkpoint.directory_use import leave_directory
from tfdml.pipeline import plan
from tfdml.pipeline.layer_costs import CallCost
from tfdml.pipeline.layer_graph import LayerGraph
from tfdml.strategies.replicas.variable_places import devices_of

# Groups of devices by name; None for plain Keras.
CUTS = {"plain": None, "two_groups": cases.TWO_GROUPS, "four_stages": cases.FOUR_STAGES}
# Steps after which a training that resumes is interrupted: in the middle of its second epoch.
ENDS_AFTER = 7
EPOCHS = 2


class Interruption(Exception):
    """Ends a training in the middle of an epoch."""


def interrupted() -> keras.callbacks.Callback:
    """Returns a callback without state that ends a training in its second epoch."""
    seen = []

    def end(batch: int, logs: dict | None) -> None:
        seen.append(batch)
        if len(seen) == ENDS_AFTER:
            raise Interruption

    return keras.callbacks.LambdaCallback(on_train_batch_end=end)


def use_float64() -> None:
    """Makes models that are built from now on compute in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def built(cut: str, model: str, **options: Any) -> keras.Model:
    """Returns a compiled model, in stages or not."""
    if CUTS[cut] is None:
        return cases.compiled(model, **options)
    with cases.strategy(CUTS[cut]).scope():
        return cases.compiled(model, **options)


def state(made: keras.Model) -> dict[str, Any]:
    """Returns weights and slots."""
    return {
        "weights": [v.numpy() for v in made.weights],
        "slots": [np.array(v) for v in made.optimizer.variables],
    }


def fit(made: keras.Model, model: str, **options: Any) -> dict[str, Any]:
    """Trains, and returns the history, weights and slots."""
    x, y = cases.data(model)
    given = {"batch_size": cases.BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = made.fit(x, y, **{**given, **options}).history
    return {"history": {k: np.array(v) for k, v in history.items()}, **state(made)}


def resumed(cuts: Sequence[str], model: str, directory: str) -> tuple[dict, dict]:
    """Returns the results of a training by plain Keras, and of one that is interrupted.

    Args:
        cuts: Names in `CUTS`: before and after the interruption.
        model: Name of the model.
        directory: Directory of the checkpoints.
    """
    use_float64()
    whole = fit(built("plain", model), model)
    for number, cut in enumerate(cuts):
        keras.backend.clear_session()
        callbacks = [tfdml.callbacks.FaultTolerantCheckpoint(directory, save_freq=1)]
        callbacks += [interrupted()] if number == 0 else []
        try:
            end = fit(built(cut, model), model, callbacks=callbacks)
            assert number == 1, "It was to be interrupted."
        except Interruption:
            assert number == 0
        finally:
            leave_directory(directory)
    return whole, end


def cuts_of_two_jobs(directory: str) -> list[list[int]]:
    """Returns the cut of a job, that of one that resumes it, and that of a third one."""
    found = []
    for stages, resumes in ([["one"], ["two", "three"]], True), (None, True), (None, False):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        with cases.strategy(cases.ONE_GROUP, stages=stages).scope():
            layers = [keras.layers.Dense(6, "tanh", name=n) for n in ("one", "two", "three")]
            made = keras.Sequential([keras.Input((6,)), *layers])
            made.compile("adam", "mse")
        given = [tfdml.callbacks.FaultTolerantCheckpoint(directory)] if resumes else []
        x = np.ones((12, 6), "float32")
        # A clock by which the last layer takes all of the time.
        with mock.patch.object(plan, "layer_costs", _slow_last_layer):
            made.fit(x, x, 6, epochs=1 + len(found), callbacks=given, verbose=0)
        leave_directory(directory)
        found.append(made.distribute_strategy.extended.stages[made][1])
        places = [devices_of(v)[0][-5:] for v in made.trainable_variables[::2]]
        assert places == [f"CPU:{stage}" for stage in found[-1]]
    return found


def _slow_last_layer(graph: LayerGraph, rows: int) -> list[CallCost]:
    return [CallCost(1.0, 1.0), CallCost(1.0, 1.0), CallCost(9.0, 9.0)]


def loaded(cuts: Sequence[str], model: str, path: str) -> tuple[dict, dict]:
    """Returns the results of plain Keras, and of a model saved after an epoch and loaded.

    Args:
        cuts: Names in `CUTS`: before and after saving.
        model: Name of the model.
        path: Path of the file.
    """
    use_float64()
    plain = built("plain", model)
    fit(plain, model, epochs=1)
    whole = fit(plain, model, epochs=1)
    before, after = cuts
    first = built(before, model)
    fit(first, model, epochs=1)
    first.save(path)
    if CUTS[after] is None:
        return whole, fit(keras.models.load_model(path), model, epochs=1)
    with cases.strategy(CUTS[after]).scope():
        second = keras.models.load_model(path)
    end = fit(second, model, epochs=1)
    assert_slots_are_with_their_weights(second)
    return whole, end


def assert_slots_are_with_their_weights(made: keras.Model) -> None:
    """Asserts that each slot of Adam is on the devices of its weight, and not all are on one."""
    optimizer = made.optimizer
    places = [devices_of(v) for v in made.trainable_variables]
    assert len(set(places)) > 1
    for slots in (optimizer._momentums, optimizer._velocities):
        assert [devices_of(slot) for slot in slots] == places


def used_in_any_order(cut: str, model: str) -> dict[str, Any]:
    """Predicts before training, sets weights, trains twice, compiles again, and goes on."""
    use_float64()
    made = built(cut, model)
    x, y = cases.data(model)
    rows = {"batch_size": cases.BATCH, "verbose": 0}
    seen = [made.predict(x, **rows), made.predict_on_batch(x[: cases.BATCH])]
    seen.append(made.evaluate(x, y, **rows))
    made.set_weights([v.numpy() / 2 for v in made.weights])
    seen.append(made.predict(x, **rows))
    seen += [fit(made, model, epochs=1), fit(made, model, epochs=1)]
    made.set_weights([v.numpy() / 2 for v in made.weights])
    seen.append(made.predict(x, **rows))
    if cut == "plain":
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9), made.loss)
    else:
        with made.distribute_strategy.scope():
            made.compile(keras.optimizers.SGD(0.1, momentum=0.9), made.loss)
    seen += [fit(made, model, epochs=1), made.evaluate(x, y, **rows)]
    seen += [made.train_on_batch(x[: cases.BATCH], y[: cases.BATCH])]
    seen += [made.test_on_batch(x[: cases.BATCH], y[: cases.BATCH])]
    seen += [made.predict(x, **rows), state(made)]
    return dict(enumerate(seen))


def both_in_any_order(cut: str, model: str) -> tuple[dict, dict]:
    """Returns the results of plain Keras, and those in stages."""
    return used_in_any_order("plain", model), used_in_any_order(cut, model)


def predicted(cut: str) -> np.ndarray:
    """Returns the predictions of a model that is not compiled."""
    use_float64()
    x, _ = cases.data("residual")
    keras.utils.set_random_seed(11)
    if CUTS[cut] is None:
        return cases.residual().predict(x, batch_size=cases.BATCH, verbose=0)
    with cases.strategy(CUTS[cut]).scope():
        made = cases.residual()
    found = made.predict(x, batch_size=cases.BATCH, verbose=0)
    assert len({devices_of(v) for v in made.weights}) > 1
    return found


def both_predicted(cut: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the predictions of plain Keras, and those in stages."""
    return predicted("plain"), predicted(cut)


def with_callbacks(cut: str, directory: str) -> dict[str, Any]:
    """Trains with Keras's callbacks, which read and restore weights."""
    use_float64()
    path = f"{directory}/{cut}.keras"
    x, y = cases.data("residual")
    made = built(cut, "residual")
    callbacks = [
        keras.callbacks.EarlyStopping("loss", min_delta=0.02, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(path, save_best_only=True),
        keras.callbacks.TensorBoard(f"{directory}/{cut}", histogram_freq=1),
        keras.callbacks.ReduceLROnPlateau("loss", min_delta=1.0, patience=1),
    ]
    options = {"validation_data": (x[:20], y[:20]), "epochs": 6, "callbacks": callbacks}
    return {**fit(made, "residual", **options), "saved": keras.models.load_model(path).predict(x)}


def both_with_callbacks(cut: str, directory: str) -> tuple[dict, dict]:
    """Returns the results of plain Keras, and those in stages."""
    return with_callbacks("plain", directory), with_callbacks(cut, directory)
