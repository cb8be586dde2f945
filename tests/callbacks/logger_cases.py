"""Cases run by ranks: loggers of other packages; each returns the calls of a rank's callbacks."""

import sys
import types
import warnings

import keras
import numpy as np

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import compiled, data


class Noted(keras.callbacks.Callback):
    """Logger that records the calls of its methods."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def on_train_begin(self, logs=None):
        self.calls.append("train")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"epoch {sorted(logs)}")

    def on_test_end(self, logs=None):
        self.calls.append("test")

    def on_predict_end(self, logs=None):
        self.calls.append("predict")


def of_package(module: str) -> type[Noted]:
    """Returns a stand-in for a package's callback class, derived as a user would."""
    theirs = type("TheirLogger", (Noted,), {"__module__": module})
    return type("OwnLogger", (theirs,), {"__module__": "train"})


def called(modules: list[str]) -> dict[str, list[str]]:
    """Returns the calls of each package's logger, and of one wrapped in `ChiefOnly`."""
    strategy = rank_job.strategy()
    x, y = data(16)
    model = compiled(strategy)
    noted = {module: of_package(module)() for module in modules}
    inner = Noted()
    callbacks = [*noted.values(), tfdml.callbacks.ChiefOnly(inner)]
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    model.evaluate(x, y, verbose=0, callbacks=callbacks)
    model.predict(x, verbose=0, callbacks=callbacks)
    return {**{module: c.calls for module, c in noted.items()}, "ChiefOnly": inner.calls}


def warned_of(package: str) -> list[str]:
    """Returns the warnings of a fit while a run of the package is active on every rank."""
    strategy = rank_job.strategy()
    module = types.ModuleType(package)
    module.run = types.SimpleNamespace(disabled=False)
    module.active_run = lambda: module.run
    sys.modules[package] = module
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(strategy).fit(*data(16), batch_size=8, verbose=0)
    finally:
        del sys.modules[package]
    return [str(w.message) for w in caught if "is active on rank" in str(w.message)]


def plain() -> list[str]:
    """Returns the calls of a callback wrapped in `ChiefOnly` in plain Keras."""
    inner = Noted()
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ones = np.ones((8, 2))
    model.fit(ones, ones[:, :1], verbose=0, callbacks=[tfdml.callbacks.ChiefOnly(inner)])
    return inner.calls
