"""Runs several jobs on a local Spark cluster, with the session of the recipe; prints a report."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyspark
import spark
from spark_tensorflow_distributor import MirroredStrategyRunner

IMAGES = np.random.default_rng(0).random((70, 4, 4, 1), np.float32)
CLASSES = np.arange(70) % 10


def trained() -> tuple[int, list[float], list[list[float]], int]:
    """Trains for two epochs; returns this process's number too."""
    size, history, weights = spark.train(IMAGES, CLASSES, epochs=2, batch_size=32)
    return size, history["loss"], [w.ravel().tolist() for w in weights], os.getpid()


def failing() -> None:
    """Raises an exception on rank 1, in the second epoch."""
    import keras

    import tfdml

    class Mistake(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and strategy.rank == 1:
                raise ValueError("a callback's mistake")

    strategy = tfdml.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = spark.build_model((4, 4, 1))
        model.compile("sgd", "mse")
    model.fit(IMAGES, np.zeros((70, 10)), epochs=2, verbose=0, callbacks=[Mistake()])


def main() -> None:
    """Trains twice, and once with a rank that fails."""
    session = spark.start("local-cluster[2,1,1024]")
    runner = MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True)
    jobs = [runner.run(trained) for _ in range(2)]
    began = time.monotonic()
    try:
        runner.run(failing)
        error = ""
    except Exception as raised:  # noqa: BLE001  (Java's errors, of Py4J's class)
        error = str(raised)
    seconds = time.monotonic() - began
    folder = Path(pyspark.__file__).parent / "work" / session.sparkContext.applicationId
    logs = [file.read_text() for file in folder.glob("*/stderr")]
    report = {"jobs": jobs, "error": error, "seconds": seconds, "logs": logs}
    print(json.dumps(report), file=sys.__stdout__, flush=True)
    session.stop()


if __name__ == "__main__":
    main()
