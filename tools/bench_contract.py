"""Times what the contract costs a step: comparing batches, agreeing on them, and reading them all.

    .venv/bin/python tools/bench_contract.py

Two processes train the CNN of `bench_strategies.py` on the same images, read in different ways,
epochs in turn; each way is compared with reading whole batches without comparing them.
"""

import statistics
import sys
from pathlib import Path
from unittest import mock

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_job import conditions, in_words, ratios, report, run_job
from bench_strategies import GLOBAL_BATCH, compiled

EPOCHS = 16
STEPS = 60


def run() -> None:
    """Trains in this rank; rank 0 prints the seconds of the epochs."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdml
    from tfdml.strategies import share

    strategy = tfdml.HorovodStrategy()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(GLOBAL_BATCH * STEPS, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, len(x))
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH).cache()
    own = tf.data.Dataset.from_tensor_slices((x, y)).shard(strategy.size, strategy.rank)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    sources = {
        "whole batches, not compared": (whole, True),
        "whole batches, compared (`tf.data`)": (whole, False),
        "of unknown number, agreed on": (whole.filter(lambda x, y: True), False),
        "own parts (`AutoShardPolicy.OFF`)": (
            own.batch(GLOBAL_BATCH).cache().with_options(options),
            False,
        ),
        "arrays, own rows": (None, False),
    }
    with strategy.scope():
        models = {name: compiled("CNN") for name in sources}
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(EPOCHS + 2):
        names = list(sources)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dataset, blind = sources[name]
            data = (x, y) if dataset is None else (dataset,)
            more = {"batch_size": GLOBAL_BATCH} if dataset is None else {}
            times = []
            clock = keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs, t=times: t.append(time.perf_counter()),
                on_epoch_end=lambda epoch, logs, t=times: t.append(time.perf_counter()),
            )
            digest = (lambda batch: tf.zeros([share.DIGEST_SIZE])) if blind else share.digest_of
            with mock.patch.object(share, "digest_of", digest):
                models[name].fit(*data, verbose=0, callbacks=[clock], **more)
            seconds[name].append(times[1] - times[0])
    if strategy.is_chief:
        report({n: s[2:] for n, s in seconds.items()})


def main(rank: bool = typer.Option(False, help="What a job starts.")) -> None:
    """Prints the table."""
    if rank:
        return run()
    result = run_job(__file__, "--rank")
    print(f"Measured with {conditions()}.\n")
    print("| data | ms a step | ratio (quartiles) |\n|---|---|---|")
    base = next(iter(result.values()))
    for name, times in result.items():
        print(
            f"| {name} | {statistics.median(times) / STEPS * 1000:.2f} | "
            f"{in_words(ratios(times, base))} |"
        )


if __name__ == "__main__":
    typer.run(main)
