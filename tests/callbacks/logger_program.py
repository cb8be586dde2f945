"""Trains on every rank with a logger, as a user's script does, or prints what was logged.

tfdml launch --workers 2 -m tests.callbacks.logger_program mlflow DIRECTORY
python -m tests.callbacks.logger_program read-mlflow DIRECTORY
"""

import json
import os
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

ROWS = 40


def train(kind: str, directory: Path) -> None:
    """Trains; rank 0 writes the history of `fit`, and each rank its warnings."""
    import keras
    import numpy as np

    import tfdml

    strategy = tfdml.MultiWorkerMirroredStrategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = _callbacks(kind, directory, strategy.is_chief)
        history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    active_run_warnings = [str(w.message) for w in caught if "is active on rank" in str(w.message)]
    written = {"history": history.history, "warned": active_run_warnings}
    Path(directory, f"rank{strategy.rank}.json").write_text(json.dumps(written))


def _callbacks(kind: str, directory: Path, is_chief: bool) -> list:
    if kind.startswith("mlflow"):
        import mlflow

        mlflow.set_tracking_uri(_store(directory))
        if kind == "mlflow":
            return [mlflow.keras.MlflowCallback()]
        mlflow.keras.autolog(log_models=False, log_datasets=False)
        return []
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    if kind == "wandb" and not is_chief:
        return []
    wandb.init(mode="offline", project="tests", dir=directory)
    return [WandbMetricsLogger()]


def _store(directory: Path) -> str:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return f"file:{directory}/mlruns"


def read_mlflow(directory: Path) -> list[dict[str, list[float]]]:
    """Returns the metrics of each run."""
    import mlflow

    client = mlflow.MlflowClient(_store(directory))
    return [
        {
            name: [m.value for m in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        for run in client.search_runs(["0"])
    ]


def read_wandb(directory: Path) -> list[dict[str, list[float]]]:
    """Returns the metrics of each run."""
    from wandb.proto import wandb_internal_pb2

    runs = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        found: dict[str, list[float]] = {}
        for record in _records(path.read_bytes()):
            for item in wandb_internal_pb2.Record.FromString(record).history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, []).append(json.loads(item.value_json))
        runs.append(found)
    return runs


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the records of LevelDB's log format, in which W&B writes a run.

    A header of 7 bytes is followed by blocks of 32 KiB. Each part of a record has a checksum, a
    length and a type: 1 whole, 2 first, 3 middle, 4 last.
    """
    position, parts = 7, []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "read-mlflow":
        print(json.dumps(read_mlflow(where)))
    elif what == "read-wandb":
        print(json.dumps(read_wandb(where)))
    else:
        train(what, where)
