"""Rank of `tools.bench.compression` with TensorFlow, on a host of the network lab."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import keras
import tensorflow as tf
import typer

import tfdml
from tfdml import compression
from tfdml.compression.exchange.by_hosts import can_sum_by_hosts
from tools.bench.compression.exchange import both_ways, exchange
from tools.bench.compression.model import (
    AT_ONCE,
    AUTO,
    CLASSES,
    GLOBAL_BATCH,
    LAYERS,
    OF_WORKERS,
    WARM_UP,
    WIDTH,
    Clock,
    sent_bytes,
    steps_of,
    timed,
)
from tools.bench.compression.networks import NETWORKS, data
from tools.bench.harness import report, start

# Names as in `tools.bench.compression.model`.
OURS: dict[str, Callable[[], compression.Compressor | None]] = {
    "none": lambda: None,
    "fp16": compression.Float16,
    "bf16": compression.BFloat16,
    "int8": compression.QSGD,
    "int8 stochastic": lambda: compression.QSGD(stochastic=True),
    "int4": lambda: compression.QSGD(bits=4),
    "int2": lambda: compression.QSGD(bits=2),
    "natural": compression.NaturalCompression,
    "terngrad": compression.TernGrad,
    "onebit": compression.OneBit,
    "topk 1 %": compression.TopK,
    "dgc 1 %": lambda: compression.DeepGradientCompression(0.01),
    "dgc 0.1 %": lambda: compression.DeepGradientCompression(0.001),
    "randomk 1 %": lambda: compression.RandomK(0.01),
    "powersgd 2": lambda: compression.PowerSGD(2),
    "powersgd 4": lambda: compression.PowerSGD(4),
    "powersgd 4 in turns": lambda: compression.PowerSGD(4, alternate=True),
    AUTO: compression.Auto,
}


def loss() -> keras.losses.Loss:
    """Returns the loss."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def ours(
    network: str, strategy: tf.distribute.Strategy, steps: int, warm_up: int, xla: bool
) -> dict[str, float]:
    """Times steps of `fit` in a strategy's scope."""
    with strategy.scope():
        model = NETWORKS[network][0]()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss(), jit_compile=xla)
    clock = _fitting(model, network, steps, warm_up, keras.callbacks.LambdaCallback)
    state = strategy.extended.get_aggregator(model.optimizer).state
    by_hosts = [bool(v.numpy()) for n, v in state.items() if n.startswith("by_hosts/")]
    return {**clock.summary(), "by_hosts": any(by_hosts)}


def _fitting(model: Any, network: str, steps: int, warm_up: int, callback: type) -> Clock:
    """Returns the clock of an epoch of `fit`, after one that warms up, without its first step.

    Args:
        model: A compiled model of any Keras.
        network: Name of the network, whose data it gets.
        steps: Steps of the epoch.
        warm_up: Steps of the first one.
        callback: The `LambdaCallback` of the same Keras.
    """
    clock = Clock()
    ticks = callback(
        on_epoch_begin=lambda epoch, logs: clock.start(),
        on_train_batch_end=lambda batch, logs: clock.tick(),
    )
    model.fit(*data(network, warm_up), batch_size=GLOBAL_BATCH, verbose=0)
    model.fit(*data(network, steps), batch_size=GLOBAL_BATCH, verbose=0, callbacks=[ticks])
    # The first step of a call includes its checks.
    clock.rows = clock.rows[1:] or clock.rows
    return clock


def raw_horovod(network: str, fp16: bool | None, steps: int, xla: bool) -> dict[str, float]:
    """Times steps of a hand-written loop over Horovod; without any exchange if `fp16` is None."""
    import horovod.tensorflow as hvd

    hvd.init()
    model, loss_function = NETWORKS[network][0](), loss()
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    rows = GLOBAL_BATCH // hvd.size()
    x, y = (tf.constant(a[:rows]) for a in data(network, 1))
    method = hvd.Compression.fp16 if fp16 else hvd.Compression.none

    @tf.function(jit_compile=xla)
    def backward() -> list:
        with tf.GradientTape() as tape:
            value = loss_function(y, model(x, training=True))
        return tape.gradient(value, model.trainable_variables)

    @tf.function
    def step() -> None:
        gradients = backward()
        if fp16 is not None:
            dense = [i for i, g in enumerate(gradients) if not isinstance(g, tf.IndexedSlices)]
            small = [method.compress(gradients[i]) for i in dense]
            sums = hvd.grouped_allreduce([g for g, _ in small], op=hvd.Average)
            # Sparse gradients, which Horovod gathers.
            gradients = [
                hvd.allreduce(g, op=hvd.Average) if isinstance(g, tf.IndexedSlices) else g
                for g in gradients
            ]
            for i, total, (_, context) in zip(dense, sums, small, strict=True):
                gradients[i] = method.decompress(total, context)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return timed(step, steps, WARM_UP)


def idle(seconds: float = 3.0) -> dict[str, float]:
    """Returns the bytes that an idle Horovod sends in a second."""
    import horovod.tensorflow as hvd

    hvd.init()
    hvd.allreduce(tf.zeros([1]), name="idle")
    before = sent_bytes()
    time.sleep(seconds)
    return {"bytes_per_second": (sent_bytes() - before) / seconds}


@contextlib.contextmanager
def _cleared() -> Iterator[None]:
    """Context manager: clears a candidate's model and graphs."""
    try:
        yield
    finally:
        keras.backend.clear_session()


def main(
    names: str,
    rate: float,
    rank: Annotated[int, typer.Option(envvar="NETLAB_RANK")],
    ranks: Annotated[int, typer.Option(envvar="NETLAB_RANKS")],
    hosts: Annotated[int, typer.Option(envvar="NETLAB_HOSTS")],
    exchanges: bool = False,
    steps_too: bool = True,
    ways: bool = False,
    network: str = "mlp",
    xla: bool = False,
) -> None:
    """Times candidates, separated by semicolons; rank 0 reports the results."""
    results = {}
    for name in names.split(";"):
        with _cleared():
            timed_as = "powersgd 2" if name in ("idle", "local") else name
            steps = steps_of(timed_as, hosts, rate, ranks // hosts)
            if ways:
                of_job = tfdml.HorovodStrategy().extended.aggregator_choice.hosts
                compressor = OURS[name]()
                if not can_sum_by_hosts(compressor, of_job):
                    continue
                results[f"{name}, both ways"] = both_ways(network, compressor, of_job)
            elif name == "idle":
                results[name] = idle()
            elif name == OF_WORKERS:
                strategy = tfdml.MultiWorkerMirroredStrategy()
                results[name] = ours(network, strategy, steps + 1, WARM_UP, xla)
            elif name == "MultiWorkerMirrored tf_keras":
                results[name] = _keras_2(steps + 1)
            elif name == "MultiWorkerMirrored RING":
                results[name] = _peer_multi_worker(steps)
            elif name.removesuffix(AT_ONCE) in OURS:
                make = OURS[name.removesuffix(AT_ONCE)]
                strategy = tfdml.HorovodStrategy(compression=make())
                if name.endswith(AT_ONCE):
                    strategy.extended.aggregator_choice.hosts = None
                # "auto" must have chosen its codec before it is timed.
                warm_up = 35 if name == AUTO else WARM_UP
                if steps_too:
                    results[name] = ours(network, strategy, steps + 1, warm_up, xla)
                if exchanges and name != AUTO:
                    parts = exchange(
                        network, make(), steps, strategy.extended.aggregator_choice.hosts
                    )
                    # Next to step times, it is from one run with its peers.
                    own = {"exchange": parts["together"]} if steps_too else {}
                    results[name] = results.get(name, {}) | own | parts
            else:
                fp16 = {"local": None, "raw Horovod": False, "raw Horovod fp16": True}[name]
                results[name] = raw_horovod(network, fp16, steps, xla)
            if rank == 0:
                print(*list(results.items())[-1], file=sys.stderr, flush=True)
    if rank == 0:
        report(results)


def _keras_2(steps: int) -> dict[str, float]:
    """Times steps of the frozen Keras 2's `fit` under TensorFlow's own strategy."""
    import tf_keras

    layers = tf_keras.layers
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        model = tf_keras.Sequential([layers.Input((WIDTH,)), *hidden, layers.Dense(CLASSES)])
        cross_entropy = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.SGD(0.01, momentum=0.9), cross_entropy)
    return _fitting(model, "mlp", steps, WARM_UP, tf_keras.callbacks.LambdaCallback).summary()


def _peer_multi_worker(steps: int) -> dict[str, float]:
    """Times TensorFlow's own strategy in a hand-written loop: Keras 3 does not run under it."""
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    rows = GLOBAL_BATCH // strategy.num_replicas_in_sync
    x, y = (tf.constant(a[:rows]) for a in data("mlp", 1))
    with strategy.scope():
        weights = []
        for n, m in [(WIDTH, WIDTH)] * LAYERS + [(WIDTH, CLASSES)]:
            weights += [
                tf.Variable(tf.random.normal([n, m], stddev=n**-0.5)),
                tf.Variable(tf.zeros([m])),
            ]
        speeds = [tf.Variable(tf.zeros(w.shape)) for w in weights]

    def replica_step() -> None:
        with tf.GradientTape() as tape:
            h = x
            for i in range(0, len(weights), 2):
                h = h @ weights[i] + weights[i + 1]
                h = tf.nn.relu(h) if i < 2 * LAYERS else h
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, h)
            value = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        gradients = tape.gradient(value, weights)
        replica = tf.distribute.get_replica_context()
        for w, s, g in zip(weights, speeds, replica.all_reduce("sum", gradients), strict=True):
            s.assign(0.9 * s - 0.01 * g)
            w.assign_add(s)

    return timed(tf.function(lambda: strategy.run(replica_step)), steps, WARM_UP)


if __name__ == "__main__":
    start(__doc__, main)
