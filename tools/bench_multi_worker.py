"""Times `MultiWorkerMirroredStrategy` against that of the frozen Keras 2, jobs in turn.

    .venv/bin/python tools/bench_multi_worker.py

Two workers on this machine, the same model, the same global batches: ours under Keras 3, and
TensorFlow's own under `TF_USE_LEGACY_KERAS=1` (package `tf_keras`). A job trains some epochs and
reports the median; jobs alternate, and the ratio is ours by the peer's.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_job import conditions
from bench_strategies import GLOBAL_BATCH

STEPS = 40
EPOCHS = 6
WORKERS = 2


def train(peer: bool) -> None:
    """Trains in this worker; worker 0 prints the seconds of each epoch."""
    import numpy as np
    import tensorflow as tf

    if peer:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        keras = tf.keras
    else:
        import keras

        import tfdml

        strategy = tfdml.MultiWorkerMirroredStrategy()
    layers = keras.layers
    rng = np.random.default_rng(0)
    x = rng.normal(size=(GLOBAL_BATCH * STEPS, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, len(x))
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Conv2D(16, 3, activation="relu", input_shape=(28, 28, 1)),
                layers.MaxPooling2D(),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(GLOBAL_BATCH)
    seconds = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seconds.append(-time.perf_counter()),
        on_epoch_end=lambda epoch, logs: seconds.append(seconds.pop() + time.perf_counter()),
    )
    model.fit(dataset, epochs=EPOCHS + 1, verbose=0, callbacks=[clock])
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        print("SECONDS " + json.dumps(seconds[1:]), flush=True)


def job(peer: bool) -> float:
    """Runs one job of all workers; returns its median milliseconds a step."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for open_socket in sockets:
        open_socket.close()
    threads = str(max(1, (os.cpu_count() or 1) // WORKERS))
    workers = []
    for index in range(WORKERS):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "TF_USE_LEGACY_KERAS": str(int(peer)),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_NUM_INTRAOP_THREADS": threads,
        }
        command = [sys.executable, __file__, "--worker", "peer" if peer else "ours"]
        workers.append(
            subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    seconds = json.loads(outputs[0].split("SECONDS ", 1)[1].splitlines()[0])
    return statistics.median(seconds) / STEPS * 1000


def main(rounds: int = 4, worker: str = typer.Option("", help="What a job starts.")) -> None:
    """Prints a row for the benchmarks' table."""
    if worker:
        return train(worker == "peer")
    pairs = []
    for number in range(rounds):
        turn = [False, True] if number % 2 else [True, False]
        times = {peer: job(peer) for peer in turn}
        pairs.append((times[False], times[True]))
    ratios = sorted(ours / peer for ours, peer in pairs)
    ours, peers = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"Measured with {conditions()}.\n")
    print(
        f"ours {ours:.2f} ms a step, tf_keras {peers:.2f} ms a step, ratios of the jobs: ", end=""
    )
    print(", ".join(f"{r:.3f}" for r in ratios))


if __name__ == "__main__":
    typer.run(main)
