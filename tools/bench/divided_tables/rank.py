"""Rank of `tools.bench.divided_tables` with Keras: tfdml, plain Keras, and Horovod.

Candidates are tables divided among ranks, whole tables, a hand-written loop over Horovod, and
parameter servers. Plain Keras trains in one process; it writes what others are compared with.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from tools.bench.compression.model import Clock
from tools.bench.divided_tables.model import (
    ABOVE,
    BATCH,
    BELOW,
    BOUND,
    DENSE,
    RATE,
    ROWS,
    STEPS,
    TABLES,
    WARM_UP,
    WIDTH,
    batches,
    gathered_per_second,
    measured,
    rows_per_second,
)
from tools.bench.harness import report, start

# The candidate under MultiWorkerMirroredStrategy; those of tfdml with divided tables, and their
# values of `Sharding(row_codec=...)`.
WORKERS = "divided, MultiWorkerMirrored"
DIVIDED = {
    "divided": None,
    "divided, bfloat16 rows": "bfloat16",
    "divided, int8 rows": "int8",
    WORKERS: None,
}
WHOLE, LOOP = "whole", "Horovod loop"
SERVERS = ("synchronous parameter servers", "parameter servers")
PLAIN = "plain Keras"
_PORTS = {"chief": 7000, "worker": 7001, "ps": 7002}


def build(rows: int, ids_each: int = 1) -> Any:
    """Returns the network as a Keras model: tables, and layers below and above them.

    Args:
        rows: The number of rows of each table.
        ids_each: The number of ids that a sample has for each table. Their rows are added up.
    """
    import keras
    from keras import layers

    dense = keras.Input((DENSE,), name="numbers")
    ids = keras.Input((TABLES * ids_each,), dtype="int64", name="ids")
    looked_up = []
    for i in range(TABLES):
        table = layers.Embedding(
            rows,
            WIDTH,
            embeddings_initializer=keras.initializers.RandomUniform(-BOUND, BOUND),
            name=f"table_{i}",
        )
        found = table(ids[:, i * ids_each : (i + 1) * ids_each])
        looked_up.append(keras.ops.sum(found, axis=1, keepdims=True) if ids_each > 1 else found)
    below = dense
    for i, units in enumerate(BELOW):
        below = layers.Dense(units, activation="relu", name=f"below_{i}")(below)
    vectors = layers.Concatenate(axis=1)([layers.Reshape((1, WIDTH))(below), *looked_up])
    products = layers.Flatten()(layers.Dot(axes=2)([vectors, vectors]))
    above = layers.Concatenate()([below, products])
    above = layers.Dense(ABOVE[0], activation="relu", name="above_0")(above)
    return keras.Model([dense, ids], layers.Dense(ABOVE[1], name="above_1")(above))


def run(candidate: str, rows: int, ids_each: int, host: int, addresses: list[str]) -> None:
    """Times a candidate in this rank; rank 0 reports it."""
    clock = Clock()
    if candidate in SERVERS:
        with _serving(host, addresses) as servers:
            if host:
                for server in servers:
                    server.wait()
                return
            _fit_on_servers(candidate, rows, ids_each, len(addresses), clock)
            peak = _largest_memory(servers[1].pid)
        seconds, _, sent = zip(*clock.rows[WARM_UP:], strict=True)
        # Steps of several workers end together, so only their mean tells.
        report({"step": statistics.mean(seconds), "sent": statistics.mean(sent), "peak": peak})
        return
    is_chief = (_loop if candidate == LOOP else _fit)(candidate, rows, ids_each, clock)
    # The peak is that of the training.
    found = measured(clock)
    found |= {"alone": _used_per_second(rows), "memory": gathered_per_second(rows)}
    if is_chief:
        report(found)


def _used_per_second(rows: int) -> float:
    """Returns how many rows TensorFlow looks up and updates in a second, without a network."""
    import tensorflow as tf

    table = tf.Variable(tf.zeros([rows, WIDTH]))

    @tf.function
    def use(ids: tf.Tensor) -> None:
        table.scatter_sub(tf.IndexedSlices(RATE * tf.gather(table, ids), ids))

    return rows_per_second(rows, lambda ids: use(tf.constant(ids)))


def train_plainly(rows: int, ids_each: int, file: str) -> None:
    """Trains without tfdml in one process; writes the first and last values, and the losses.

    Args:
        rows: The number of rows of each table.
        ids_each: The number of ids that a sample has for each table.
        file: An .npz file to write: "losses" (WARM_UP + STEPS,), and each variable's values as
            "first/PATH" and "last/PATH".
    """
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    model = _compiled(rows, ids_each)
    values = {f"first/{v.path}": v.numpy() for v in model.trainable_variables}
    data, losses = batches(rows, ids_each), []
    for number in range(WARM_UP + STEPS):
        ids, dense, y = (each[number * BATCH : (number + 1) * BATCH] for each in data)
        model.reset_metrics()
        losses.append(float(model.train_on_batch({"numbers": dense, "ids": ids}, y)))
    values |= {f"last/{v.path}": v.numpy() for v in model.trainable_variables}
    np.savez(file, losses=losses, **values)
    report(losses)


def _compiled(rows: int, ids_each: int) -> Any:
    import keras

    model = build(rows, ids_each)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss)
    return model


@contextlib.contextmanager
def _serving(host: int, addresses: list[str]) -> Iterator[list[subprocess.Popen]]:
    """Context manager: a worker and a server run on this host; on the first, this is the chief."""
    cluster = {
        role: [f"{a}:{port}" for a in (addresses[:1] if role == "chief" else addresses)]
        for role, port in _PORTS.items()
    }

    def config(role: str, index: int) -> str:
        return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})

    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tfdml.cli.main", "serve"],
            env={**os.environ, "TF_CONFIG": config(role, host)},
            stdout=sys.stderr,
        )
        for role in ("worker", "ps")
    ]
    if not host:
        os.environ["TF_CONFIG"] = config("chief", 0)
    try:
        yield started
    finally:
        if not host:
            for process in started:
                process.terminate()


def _largest_memory(process: int) -> float:
    """Returns the largest memory that a process has had, in MiB."""
    with open(f"/proc/{process}/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _fit_on_servers(candidate: str, rows: int, ids_each: int, servers: int, clock: Clock) -> None:
    import tensorflow as tf

    import tfdml

    partitioners = tf.distribute.experimental.partitioners
    strategy = tfdml.ParameterServerStrategy(
        variable_partitioner=partitioners.MinSizePartitioner(1 << 20, max_shards=servers),
        synchronous=candidate.startswith("synchronous"),
    )
    _train(strategy, rows, ids_each, clock)


def _fit(candidate: str, rows: int, ids_each: int, clock: Clock) -> bool:
    import tfdml

    sharding = None
    if candidate in DIVIDED:
        sharding = tfdml.Sharding(
            optimizer_state=False,
            embeddings=True,
            min_embedding_bytes=0,
            row_codec=DIVIDED[candidate],
        )
    kind = tfdml.MultiWorkerMirroredStrategy if candidate == WORKERS else tfdml.HorovodStrategy
    strategy = kind(sharding=sharding)
    _train(strategy, rows, ids_each, clock)
    return strategy.is_chief


def _train(strategy, rows: int, ids_each: int, clock: Clock) -> None:
    import keras

    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = _compiled(rows, ids_each)
    ids, dense, y = batches(rows, ids_each)
    ticks = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: clock.start(), on_train_batch_end=_ticking(clock)
    )
    model.fit({"numbers": dense, "ids": ids}, y, BATCH, verbose=0, shuffle=False, callbacks=[ticks])


def _ticking(clock: Clock) -> Callable:
    def tick(batch: int, logs: dict) -> None:
        float(logs["loss"])  # The step has ended.
        clock.tick()

    return tick


def _loop(candidate: str, rows: int, ids_each: int, clock: Clock) -> bool:
    del candidate
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    keras.utils.set_random_seed(0)
    whole = build(2, ids_each)
    # The layers around the tables are Keras's; lookups and updates read the rows alone.
    rest = keras.Model(
        [whole.inputs[0], *(whole.get_layer(f"table_{i}").output for i in range(TABLES))],
        whole.outputs,
    )
    tables = [
        tf.Variable(tf.random.uniform([rows, WIDTH], -BOUND, BOUND, seed=i)) for i in range(TABLES)
    ]
    weights = rest.trainable_variables
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    own = BATCH // hvd.size()

    @tf.function
    def step(ids: tf.Tensor, dense: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            by_table = tf.split(ids, TABLES, axis=1)
            looked_up = [tf.gather(*each) for each in zip(tables, by_table, strict=True)]
            value = loss(y, rest([dense, *looked_up]))
        gradients = tape.gradient(value, [*(w.value for w in weights), *tables])
        sums = hvd.grouped_allreduce(gradients[: len(weights)])
        for weight, gradient in zip(weights, sums, strict=True):
            weight.assign_sub(RATE * gradient)
        for table, gradient in zip(tables, gradients[len(weights) :], strict=True):
            total = hvd.allreduce(gradient)
            table.scatter_sub(tf.IndexedSlices(RATE * total.values, total.indices))
        return value

    data = batches(rows, ids_each)
    clock.start()
    for number in range(WARM_UP + STEPS):
        first = number * BATCH + hvd.rank() * own
        float(step(*(tf.constant(part[first : first + own]) for part in data)))
        clock.tick()
    return hvd.rank() == 0


def main(
    candidate: Annotated[str, typer.Argument(help="What is trained.")],
    rows: Annotated[int, typer.Option(help="Rows of each of the tables.")] = ROWS,
    ids_each: Annotated[int, typer.Option(help="Ids of a sample for each table.")] = 1,
    values: Annotated[str, typer.Option(help="File that plain Keras writes.")] = "",
    host: Annotated[int, typer.Option(envvar="NETLAB_HOST", hidden=True)] = 0,
    addresses: Annotated[str, typer.Option(envvar="NETLAB_ADDRESSES", hidden=True)] = "",
) -> None:
    """Trains a candidate."""
    if candidate == PLAIN:
        return train_plainly(rows, ids_each, values)
    run(candidate, rows, ids_each, host, addresses.split(","))


if __name__ == "__main__":
    start(__doc__, main)
