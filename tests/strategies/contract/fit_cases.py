"""Cases run by ranks: optimizers, policies, callbacks and saving with `compile` and `fit`."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.harness import rank_job
from tests.strategies.cases import InScope, compiled, data, fitted, outcome
from tfdml.compression import DeepGradientCompression
from tfdml.strategies.keras_seam.fit import progress


def optimizer(name: str, options: dict) -> dict:
    """Trains with an optimizer's options on batches of which the last has 1 row."""
    x, y = data(49)
    if name == "schedule":
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
        made = InScope(keras.optimizers.SGD, schedule)
    else:
        made = InScope(getattr(keras.optimizers, name), **{"learning_rate": 0.01, **options})
    model = compiled(rank_job.strategy(), optimizer=made)
    result = fitted(model, x, y)
    result["iterations"] = np.array(model.optimizer.iterations)
    return result


def momentum_before_the_exchange() -> dict:
    """Deep gradient compression that sends everything: the optimizer's momentum, moved."""
    x, y = data(49)
    strategy = rank_job.strategy(compression=DeepGradientCompression(1.0, momentum=0.9))
    made = InScope(keras.optimizers.SGD, 0.01, momentum=0.9)
    return fitted(compiled(strategy, optimizer=made), x, y)


def policy(name: str) -> dict:
    """Trains with a mixed-precision policy."""
    keras.config.set_dtype_policy(name)
    x, y = data(48)
    model = compiled(rank_job.strategy(), optimizer=InScope(keras.optimizers.SGD, 0.05))
    return fitted(model, x, y, rows=12)


def distributed_data(method: str) -> dict:
    """Calls a method with data that are already distributed, as in TensorFlow's guide."""
    strategy = rank_job.strategy()
    model = compiled(strategy)
    batches = tf.data.Dataset.from_tensor_slices(data(13)).batch(4)
    distributed = strategy.experimental_distribute_dataset(batches)
    options = {"validation_data": distributed, "epochs": 2} if method == "fit" else {}
    result = getattr(model, method)(distributed, verbose=0, **options)
    if method == "fit":
        return outcome(model, result)
    return {**outcome(model), "result": np.array(result)}


def stops(kind: str) -> dict:
    """Callbacks that decide by the logs, or by themselves at the end of an epoch."""
    strategy = rank_job.strategy()
    x, y = data(48)
    model = compiled(strategy)
    epochs = []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    callbacks = [count]
    if kind == "nan":
        x = x.copy()
        x[47] = np.nan  # The last replica's last row.
        callbacks.append(keras.callbacks.TerminateOnNaN())
    elif kind == "early":
        callbacks.append(keras.callbacks.EarlyStopping("loss", min_delta=1e3, patience=1))
    elif kind == "plateau":
        callbacks.append(keras.callbacks.ReduceLROnPlateau("loss", min_delta=1e3, patience=1))
    elif kind == "one rank":

        def stop(epoch, logs):
            if strategy.rank == strategy.size - 1 and epoch == 1:
                model.stop_training = True

        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=stop))
    model.fit(x, y, batch_size=12, epochs=6, shuffle=False, verbose=0, callbacks=callbacks)
    return {"epochs": len(epochs), "rate": float(np.asarray(model.optimizer.learning_rate))}


def files(directory: str) -> list[str]:
    """Callbacks that write files: only rank 0's may exist."""
    strategy = rank_job.strategy()
    x, y = data(48)
    own = Path(directory, f"rank{strategy.rank}")
    own.mkdir()
    os.chdir(own)
    model = compiled(strategy)
    callbacks = [
        keras.callbacks.ModelCheckpoint("model.keras"),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("board"),
        keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False),
    ]
    model.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=callbacks)
    return sorted(p.name for p in own.iterdir())


def printed(verbose: int | None, interval: float | None) -> str:
    """Returns this rank's output of `fit`, `evaluate` and `predict`.

    Args:
        verbose: Their argument; None to omit it.
        interval: Seconds between two lines within an epoch; None for the default.
    """
    strategy = rank_job.strategy()
    x, y = data(48)
    model = compiled(strategy)
    options = {} if verbose is None else {"verbose": verbose}
    seconds = progress.INTERVAL if interval is None else interval
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        mock.patch.object(progress, "INTERVAL", seconds),
    ):
        model.fit(x, y, batch_size=12, epochs=2, validation_data=(x, y), **options)
        model.evaluate(x, y, **options)
        model.predict(x, batch_size=48, **options)
    return output.getvalue()


def saved(path: str) -> np.ndarray:
    """Rank 0 saves a model trained in a scope; returns the model's predictions."""
    strategy = rank_job.strategy()
    x, y = data(24)
    model = compiled(strategy)
    model.fit(x, y, batch_size=12, verbose=0)
    if strategy.is_chief:
        model.save(path)
    return model.predict(x, verbose=0)


def loaded_elsewhere(path: str) -> np.ndarray:
    """Loads the model in a process without tfdml; returns its predictions."""
    code = (
        "import sys; sys.modules['tfdml'] = None\n"
        "import keras, numpy as np\n"
        f"model = keras.models.load_model({path!r})\n"
        f"x = np.load({path + '.x.npy'!r})\n"
        f"np.save({path + '.y.npy'!r}, model.predict(x, verbose=0, batch_size=32))\n"
    )
    np.save(path + ".x.npy", data(24)[0])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180, capture_output=True)
    return np.load(path + ".y.npy")
