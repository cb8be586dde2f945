"""Times the cost of the data contract in a step: comparing batches, agreeing on them, one order.

    python -m tools.bench.contract --epochs 24

Two processes train the CNN of `tools.bench.strategies` on the same images. Each way of reading is
timed in turn with the same reading without the contract: batches are not compared, processes do not
agree on whether all have one, and for arrays each process reads its own half as Keras does.

Steps are timed from the end of an epoch's first to the end of its last; the time to open and close
the data is reported separately. Each way without the contract is timed twice, with a model of its
own: the difference of the two is the measurement noise. The noise exceeds the allowed cost of the
contract, so CPU time is measured as well: that of rank 0 to read a batch, with the contract minus
without it, and to compare digests in a step. The idle load, from Horovod's thread that polls 200
times a second, is subtracted: it depends on the waiting time.
"""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any
from unittest import mock

import typer

from tools.bench.figures import fastest, in_words, ratios
from tools.bench.harness import conditions, report, run_job, start
from tools.bench.strategies import GLOBAL_BATCH, compiled, images

STEPS = 40
# Timed variants: the last repeats the second.
WHO = ("with", "without", "again")


@dataclasses.dataclass(frozen=True)
class Reading:
    """Way of reading data.

    Attributes:
        data: Data passed to `fit`.
        bare: Callable that returns what Keras iterates over without the contract, given the
            pipeline and the strategy's extension.
        base: Data passed to `fit` without the contract, if different.
    """

    data: tuple
    bare: Callable[[Any, Any], Any]
    base: tuple | None = None


def readings(strategy) -> dict[str, Reading]:
    """Returns the ways of reading, by name."""
    import tensorflow as tf
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    from tfdml.strategies.input.local_batch import BatchSplitter
    from tfdml.strategies.keras_seam.data.data_source import OneByOne

    x, y = images(STEPS)
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

    def of_all(local_batch):
        return local_batch._replace(global_rows=tf.constant(GLOBAL_BATCH, tf.int64))

    def as_local_batches(dataset, extended):
        made = dataset.map(
            lambda *batch: of_all(BatchSplitter(0, 1, 1).split(batch)),
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
            (own_part,), as_local_batches, (own_part.rebatch(local),)
        ),
        "own parts of unknown number, agreed on": Reading(
            (some,), lambda d, e: OneByOne(as_local_batches(d, e)), (some.rebatch(local),)
        ),
        "arrays, one order for all": Reading((x, y), as_local_batches, (half,)),
    }


@contextlib.contextmanager
def read_as(way: Reading, who: str) -> Iterator[dict[str, Any]]:
    """Context manager: Keras reads with or without the contract; yields the arguments of `fit`."""
    import tensorflow as tf

    from tfdml.strategies.input import local_batch
    from tfdml.strategies.keras_seam.fit import trainer

    bare = who != "with"
    data = way.base if bare and way.base else way.data
    arguments = dict(zip("xy", data, strict=False))
    if len(data) > 1:
        arguments["batch_size"] = GLOBAL_BATCH
    with contextlib.ExitStack() as without:
        if bare:
            digest = lambda batch: tf.zeros([local_batch.DIGEST_SIZE])  # noqa: E731
            without.enter_context(mock.patch.object(local_batch, "digest_of", digest))
            local_batches = lambda a, d, e, **_: (a, way.bare(d, e))  # noqa: E731
            without.enter_context(mock.patch.object(trainer, "local_batches", local_batches))
        yield arguments


def train(model: Any, way: Reading, who: str) -> tuple[float, float]:
    """Returns the seconds of a step in mid-epoch, and an epoch's seconds outside of its steps."""
    import keras

    times: list[float] = []
    now = lambda *_, **__: times.append(time.perf_counter())  # noqa: E731
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=now, on_train_batch_end=now, on_epoch_end=now
    )
    with read_as(way, who) as arguments:
        model.fit(**arguments, verbose=0, callbacks=[clock])
    # The first step includes opening the data.
    step = (times[-2] - times[1]) / (STEPS - 1)
    return step, times[-1] - times[0] - STEPS * step


def idle_share(seconds: float = 3.0) -> float:
    """Returns the CPU seconds that the idle process uses per second."""
    begin = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - begin) / seconds


def read_alone(strategy: Any, way: Reading, who: str, idle: float) -> float:
    """Returns the CPU seconds of reading a batch without using it.

    Args:
        strategy: Strategy to read under.
        way: Way of reading.
        who: One of `WHO`.
        idle: Result of `idle_share`.
    """
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    with read_as(way, who) as arguments:
        epoch = TFEpochIterator(
            distribute_strategy=strategy, shuffle=True, steps_per_execution=1, **arguments
        )
    begin, began = time.process_time(), time.perf_counter()
    batches = sum(1 for _ in epoch._distributed_dataset)
    waited = idle * (time.perf_counter() - began)
    return (time.process_time() - begin - waited) / batches


def compare_digests(collective: Any, calls: int = 2000) -> float:
    """Returns the CPU seconds that a step needs to compare digests."""
    import tensorflow as tf

    from tfdml.strategies.input.input_checks import check_digests, digest_slots
    from tfdml.strategies.input.local_batch import DIGEST_SIZE

    @tf.function
    def compare(digest):
        slots = digest_slots(digest, collective)
        check_digests(tf.stack([tf.reduce_sum(slots, 0)] * collective.size))
        return digest

    @tf.function
    def nothing(digest):
        return tf.identity(digest)

    def seconds(function) -> float:
        function(digest)
        begin = time.process_time()
        for _ in range(calls):
            function(digest)
        return (time.process_time() - begin) / calls

    digest = tf.zeros([DIGEST_SIZE])
    return seconds(compare) - seconds(nothing)


def run(epochs: int) -> None:
    """Trains in this rank; rank 0 reports the seconds."""
    import keras

    import tfdml

    strategy = tfdml.HorovodStrategy()
    ways = readings(strategy)
    with strategy.scope():
        models = {(name, who): compiled("CNN", keras) for name in ways for who in WHO}
    steps = {name: {who: [] for who in WHO} for name in ways}
    reads = {name: {who: [] for who in WHO} for name in ways}
    rests = {name: {who: [] for who in WHO} for name in ways}
    idle = idle_share()
    orders = itertools.cycle(itertools.permutations(WHO))
    for order in itertools.islice(orders, epochs + 2):
        for name, way in ways.items():
            for who in order:
                step, rest = train(models[name, who], way, who)
                steps[name][who].append(step)
                rests[name][who].append(rest)
                reads[name][who].append(read_alone(strategy, way, who, idle))
    if strategy.is_chief:
        # The first two epochs trace and warm up.
        late = [
            {name: {who: s[2:] for who, s in pair.items()} for name, pair in seconds.items()}
            for seconds in (steps, rests, reads)
        ]
        report([*late, compare_digests(strategy.extended.collective)])


def main(
    epochs: Annotated[int, typer.Option(help="Epochs that are timed, of 40 steps each.")] = 24,
    rank: Annotated[bool, typer.Option(hidden=True, help="What a job starts.")] = False,
) -> None:
    """Prints the table."""
    if rank:
        return run(epochs)
    steps, rests, reads, compared = run_job(
        __spec__.name, "--rank", "--epochs", str(epochs), timeout=120 + 90 * epochs
    )
    print(f"Measured with {conditions()}.\n")
    print(
        "| data | ms a step | without the contract | ratio (quartiles) | of the fastest quarter "
        "| without by itself | of the fastest quarter | counted: µs a step | of a step "
        "| once an epoch, ms: with, without |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, pair in steps.items():
        ours, base = (statistics.median(pair[who]) for who in ("with", "without"))
        ratio, itself = (
            f"{in_words(ratios(pair[who], pair['without']))} "
            f"| {fastest(pair[who], pair['without']):.3f}"
            for who in ("with", "again")
        )
        read = [statistics.median(reads[name][who]) for who in ("with", "without")]
        rest = [1e3 * statistics.median(rests[name][who]) for who in ("with", "without")]
        counted = read[0] - read[1] + compared
        print(
            f"| {name} | {ours * 1e3:.2f} | {base * 1e3:.2f} | {ratio} | {itself} "
            f"| {counted * 1e6:.0f} | {counted / base:.2%} | {rest[0]:.0f}, {rest[1]:.0f} |"
        )
    print(f"\nComparing digests within a step: {compared * 1e6:.0f} µs.")


if __name__ == "__main__":
    start(__doc__, main)
