"""Times what the contract adds to a step: comparing batches, agreeing on them, one order for all.

    .venv/bin/python tools/bench_contract.py

Two processes train the CNN of `bench_strategies.py` on the same images. Each way of reading is
timed in turn with the same reading without the contract: batches are not compared, nobody asks
whether the other has one too, and for arrays each process reads its own half as Keras does.
"""

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_job import conditions, fastest, in_words, ratios, report, run_job
from bench_strategies import GLOBAL_BATCH, compiled

EPOCHS = 24
STEPS = 40


@dataclasses.dataclass(frozen=True)
class Reading:
    """A way of reading.

    Attributes:
        data: What `fit` is given.
        bare: Returns what Keras iterates over without the contract, given the pipeline and the
            strategy's extension.
        base: What `fit` is given without the contract, where it is something else.
    """

    data: tuple
    bare: Callable[[Any, Any], Any]
    base: tuple | None = None


def readings(strategy) -> dict[str, Reading]:
    """Returns the ways of reading, by name."""
    import numpy as np
    import tensorflow as tf
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    from tfdml.strategies.keras_seam.data_source import OneByOne
    from tfdml.strategies.share import Splitter

    rng = np.random.default_rng(0)
    x = rng.normal(size=(GLOBAL_BATCH * STEPS, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, len(x))
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH).cache()
    unknown = whole.filter(lambda x, y: True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shard(strategy.size, strategy.rank)
    own_part = rows.batch(GLOBAL_BATCH).cache().with_options(options)
    some = rows.filter(lambda x, y: True).batch(GLOBAL_BATCH).cache().with_options(options)
    own = slice(strategy.rank, None, strategy.size)
    local = GLOBAL_BATCH // strategy.size
    half = ArrayDataAdapter(x[own], y[own], batch_size=local, shuffle=True).get_tf_dataset()

    def split(dataset, extended):
        return dataset.map(extended.split_element, num_parallel_calls=tf.data.AUTOTUNE)

    def of_all(portion):
        return portion._replace(
            global_rows=tf.constant(GLOBAL_BATCH, tf.int64),
            working_replicas=tf.constant(strategy.size, tf.int64),
        )

    def as_portions(dataset, extended):
        made = dataset.map(
            lambda *batch: of_all(Splitter(0, 1, 1).split(batch)),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return made.prefetch(tf.data.AUTOTUNE)

    return {
        "whole batches, compared (`tf.data`)": Reading(
            (whole,), lambda d, e: split(d, e).prefetch(tf.data.AUTOTUNE)
        ),
        "of unknown number, agreed on": Reading(
            (unknown,), lambda d, e: OneByOne(split(d, e).prefetch(tf.data.AUTOTUNE))
        ),
        "own parts (`AutoShardPolicy.OFF`)": Reading(
            (own_part,), as_portions, (own_part.rebatch(local),)
        ),
        "own parts of unknown number, agreed on": Reading(
            (some,), lambda d, e: OneByOne(as_portions(d, e)), (some.rebatch(local),)
        ),
        "arrays, one order for all": Reading((x, y), as_portions, (half,)),
    }


def run() -> None:
    """Trains in this rank; rank 0 prints the seconds of the epochs."""
    import keras
    import tensorflow as tf

    import tfdml
    from tfdml.strategies import share
    from tfdml.strategies.keras_seam import trainer

    strategy = tfdml.HorovodStrategy()
    ways = readings(strategy)
    with strategy.scope():
        models = {(name, who): compiled("CNN") for name in ways for who in ("with", "without")}

    def epoch(name: str, who: str) -> float:
        times: list[float] = []
        clock = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: times.append(time.perf_counter()),
            on_epoch_end=lambda epoch, logs: times.append(time.perf_counter()),
        )
        way, bare = ways[name], who == "without"
        data = way.base if bare and way.base else way.data
        more = {"batch_size": GLOBAL_BATCH} if len(data) > 1 else {}
        with contextlib.ExitStack() as without:
            if bare:
                digest = lambda batch: tf.zeros([share.DIGEST_SIZE])  # noqa: E731
                without.enter_context(mock.patch.object(share, "digest_of", digest))
                portions = lambda a, d, e: (a, way.bare(d, e))  # noqa: E731
                without.enter_context(mock.patch.object(trainer, "portions", portions))
            models[name, who].fit(*data, verbose=0, callbacks=[clock], **more)
        return times[1] - times[0]

    seconds = {name: {"with": [], "without": []} for name in ways}
    for number in range(EPOCHS + 2):
        for name in ways:
            for who in ("with", "without") if number % 2 else ("without", "with"):
                seconds[name][who].append(epoch(name, who))
    if strategy.is_chief:
        # The first two epochs trace and warm up.
        report({n: {who: s[2:] for who, s in pair.items()} for n, pair in seconds.items()})


def main(rank: bool = typer.Option(False, help="What a job starts.")) -> None:
    """Prints the table."""
    if rank:
        return run()
    result = run_job(__file__, "--rank")
    print(f"Measured with {conditions()}.\n")
    print(
        "| data | ms a step | without the contract | ratio (quartiles) | of the fastest quarter |"
    )
    print("|---|---|---|---|---|")
    for name, pair in result.items():
        steps = [statistics.median(pair[who]) / STEPS * 1000 for who in ("with", "without")]
        ratio = in_words(ratios(pair["with"], pair["without"]))
        quarter = fastest(pair["with"], pair["without"])
        print(f"| {name} | {steps[0]:.2f} | {steps[1]:.2f} | {ratio} | {quarter:.3f} |")


if __name__ == "__main__":
    typer.run(main)
