"""Times `MultiWorkerMirroredStrategy` against that of the frozen Keras 2, jobs in turn.

    python -m tools.bench.multi_worker --rounds 4

Two workers on this machine, the same model, the same global batches: ours under Keras 3, and
TensorFlow's own under `TF_USE_LEGACY_KERAS=1` (package `tf_keras`). A job trains some epochs and
reports the median; jobs alternate, and the ratio is ours by the peer's.
"""

import json
import os
import statistics
import time
from typing import Annotated

import typer

from tools.bench.harness import conditions, report, run_workers, start
from tools.bench.strategies import GLOBAL_BATCH, compiled, images

STEPS = 40
EPOCHS = 6


def train(peer: bool) -> None:
    """Trains in this worker; worker 0 reports the seconds of each epoch."""
    import tensorflow as tf

    if peer:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        keras = tf.keras
    else:
        import keras

        import tfdml

        strategy = tfdml.MultiWorkerMirroredStrategy()
    x, y = images(STEPS)
    with strategy.scope():
        model = compiled("CNN", keras)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(GLOBAL_BATCH)
    seconds = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seconds.append(-time.perf_counter()),
        on_epoch_end=lambda epoch, logs: seconds.append(seconds.pop() + time.perf_counter()),
    )
    model.fit(dataset, epochs=EPOCHS + 1, verbose=0, callbacks=[clock])
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        report(seconds[1:])


def job(peer: bool) -> float:
    """Runs one job of all workers; returns its median milliseconds per step."""
    seconds = run_workers(
        __spec__.name,
        "--worker",
        "peer" if peer else "ours",
        timeout=300,
        TF_USE_LEGACY_KERAS=str(int(peer)),
    )
    return statistics.median(seconds) / STEPS * 1000


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of jobs, in turn.")] = 4,
    worker: Annotated[str, typer.Option(hidden=True, help="What a job starts.")] = "",
) -> None:
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
    start(__doc__, main)
