"""Times steps of a recommender whose tables are on every rank, or divided among ranks or servers.

    python -m tools.bench.divided_tables --rate 1gbit --hosts 2
    python -m tools.bench.divided_tables --rate 100mbit --hosts 4

The model is like DLRM: 8 tables of a million rows of 64 numbers, 2 GB in sum, whose rows are
multiplied with one another, and layers below and above. A global batch has 1,024 samples, each with
an id for each table, a few of them frequent. The optimizer is SGD. Each candidate is a job of its
own, on hosts of a network lab with a rank each (root needed). The peer is a hand-written loop over
Horovod, which has whole tables and gathers the gradients of their rows. For parameter servers each
host has a worker and a server, and the first one the chief; the peak is a server's, and an
asynchronous step is a batch of one worker.
"""

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from tools.bench.compression.model import Clock
from tools.bench.harness import conditions, report, run_on_hosts, start

TABLES, ROWS, WIDTH, DENSE = 8, 1_000_000, 64, 13
BATCH = 1024
WARM_UP, STEPS = 3, 12
RATE = 0.05
SERVERS = ("synchronous parameter servers", "parameter servers")
CANDIDATES = ("divided", "whole", "Horovod loop", *SERVERS)
_PORTS = {"chief": 7000, "worker": 7001, "ps": 7002}
TIMEOUT = 900.0


def batches(rows: int):
    """Returns the ids of all samples, their numbers, and targets."""
    import numpy as np

    rng = np.random.default_rng(0)
    samples = (WARM_UP + STEPS) * BATCH
    ids = (rng.zipf(1.2, (samples, TABLES)) * 7919) % rows
    dense = rng.normal(size=(samples, DENSE)).astype("float32")
    return ids.astype("int64"), dense, rng.integers(0, 2, (samples, 1)).astype("float32")


def build(rows: int):
    """Returns the network above the tables, as a Keras model with them."""
    import keras
    from keras import layers

    dense = keras.Input((DENSE,), name="numbers")
    ids = keras.Input((TABLES,), dtype="int64", name="ids")
    looked_up = [
        layers.Embedding(rows, WIDTH, name=f"table_{i}")(ids[:, i : i + 1]) for i in range(TABLES)
    ]
    below = layers.Dense(WIDTH, activation="relu")(layers.Dense(128, activation="relu")(dense))
    vectors = layers.Concatenate(axis=1)([layers.Reshape((1, WIDTH))(below), *looked_up])
    products = layers.Flatten()(layers.Dot(axes=2)([vectors, vectors]))
    above = layers.Dense(128, activation="relu")(layers.Concatenate()([below, products]))
    return keras.Model([dense, ids], layers.Dense(1)(above))


def run(candidate: str, rows: int, host: int, addresses: list[str]) -> None:
    """Times a candidate in this rank; rank 0 reports it."""
    clock = Clock()
    if candidate in SERVERS:
        with _serving(host, addresses) as servers:
            if host:
                for server in servers:
                    server.wait()
                return
            _fit_on_servers(candidate, rows, len(addresses), clock)
            peak = _largest_memory(servers[1].pid)
        seconds, _, sent = zip(*clock.rows[WARM_UP:], strict=True)
        # Steps of several workers end together, so only their mean tells.
        report({"step": statistics.mean(seconds), "sent": statistics.mean(sent), "peak": peak})
        return
    is_chief = (_loop if candidate == "Horovod loop" else _fit)(candidate, rows, clock)
    if is_chief:
        seconds, _, sent = zip(*clock.rows[WARM_UP:], strict=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report({"step": statistics.median(seconds), "sent": statistics.median(sent), "peak": peak})


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


def _fit_on_servers(candidate: str, rows: int, servers: int, clock: Clock) -> None:
    import tensorflow as tf

    import tfdml

    partitioners = tf.distribute.experimental.partitioners
    strategy = tfdml.ParameterServerStrategy(
        variable_partitioner=partitioners.MinSizePartitioner(1 << 20, max_shards=servers),
        synchronous=candidate.startswith("synchronous"),
    )
    _train(strategy, rows, clock)


def _fit(candidate: str, rows: int, clock: Clock) -> bool:
    import tfdml

    sharding = tfdml.Sharding(optimizer_state=False, embeddings=True, min_embedding_bytes=1 << 20)
    strategy = tfdml.HorovodStrategy(sharding=sharding if candidate == "divided" else None)
    _train(strategy, rows, clock)
    return strategy.is_chief


def _train(strategy, rows: int, clock: Clock) -> None:
    import keras

    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = build(rows)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss)
    ids, dense, y = batches(rows)
    ticks = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: clock.start(), on_train_batch_end=_ticking(clock)
    )
    model.fit({"numbers": dense, "ids": ids}, y, BATCH, verbose=0, shuffle=False, callbacks=[ticks])


def _ticking(clock: Clock) -> Callable:
    def tick(batch: int, logs: dict) -> None:
        float(logs["loss"])  # The step has ended.
        clock.tick()

    return tick


def _loop(candidate: str, rows: int, clock: Clock) -> bool:
    del candidate
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    keras.utils.set_random_seed(0)
    whole = build(2)
    # The layers around the tables are Keras's; lookups and updates read the rows alone.
    rest = keras.Model(
        [whole.inputs[0], *(whole.get_layer(f"table_{i}").output for i in range(TABLES))],
        whole.outputs,
    )
    tables = [
        tf.Variable(tf.random.uniform([rows, WIDTH], -0.05, 0.05, seed=i)) for i in range(TABLES)
    ]
    weights = rest.trainable_variables
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    own = BATCH // hvd.size()

    @tf.function
    def step(ids: tf.Tensor, dense: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            looked_up = [tf.gather(t, ids[:, i : i + 1]) for i, t in enumerate(tables)]
            value = loss(y, rest([dense, *looked_up]))
        gradients = tape.gradient(value, [*(w.value for w in weights), *tables])
        sums = hvd.grouped_allreduce(gradients[: len(weights)])
        for weight, gradient in zip(weights, sums, strict=True):
            weight.assign_sub(RATE * gradient)
        for table, gradient in zip(tables, gradients[len(weights) :], strict=True):
            total = hvd.allreduce(gradient)
            table.scatter_sub(tf.IndexedSlices(RATE * total.values, total.indices))
        return value

    data = batches(rows)
    clock.start()
    for number in range(WARM_UP + STEPS):
        first = number * BATCH + hvd.rank() * own
        float(step(*(tf.constant(part[first : first + own]) for part in data)))
        clock.tick()
    return hvd.rank() == 0


def main(
    rate: Annotated[str, typer.Option(help="Limit of a host's link: 100mbit, 1gbit.")] = "1gbit",
    hosts: Annotated[int, typer.Option(min=2, help="Hosts, with a rank each.")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each of the tables.")] = ROWS,
    only: Annotated[list[str] | None, typer.Option(help="Candidates, by name.")] = None,
    candidate: Annotated[str, typer.Option(hidden=True, help="What a job trains.")] = "",
    host: Annotated[int, typer.Option(envvar="NETLAB_HOST", hidden=True)] = 0,
    addresses: Annotated[str, typer.Option(envvar="NETLAB_ADDRESSES", hidden=True)] = "",
) -> None:
    """Prints the table for the benchmarks' page."""
    if candidate:
        return run(candidate, rows, host, addresses.split(","))
    print(f"Measured with {conditions(load=True)}.\n")
    print(f"| {hosts} ranks, {rate} | step, ms | MB sent by a rank | peak of a rank, MiB |")
    print("|---|---:|---:|---:|", flush=True)
    for name in only or CANDIDATES:
        found = run_on_hosts(
            __spec__.name, "--candidate", name, "--rows", str(rows),
            hosts=hosts, rate=rate, job="none" if name in SERVERS else "horovod", timeout=TIMEOUT,
        )  # fmt: skip
        sent, peak = found["sent"] / 1e6, found["peak"]
        print(f"| {name} | {1000 * found['step']:.1f} | {sent:.2f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    start(__doc__, main)
