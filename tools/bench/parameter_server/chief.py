"""Chief of a cluster of `tools.bench.parameter_server`; measures seconds of epochs, or rates."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Annotated, Any

import psutil
import typer

from tools.bench.harness import module_command, report, start

STEPS, BATCH, FEATURES, CLASSES = 100, 64, 64, 10
SLOWER, PERIOD_SECONDS = 5, 0.05


def make_model(keras: Any, width: int) -> Any:
    """Returns an uncompiled classifier of any Keras."""
    return keras.Sequential(
        [
            keras.layers.InputLayer((FEATURES,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def compiled(keras: Any, width: int) -> Any:
    """Returns the classifier, compiled."""
    model = make_model(keras, width)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model


def make_data(*_: Any, rows: int = BATCH) -> Any:
    """Returns endless batches, read from memory."""
    import tensorflow as tf

    x = tf.random.stateless_normal([1024, FEATURES], [1, 2])
    y = tf.cast(tf.reduce_sum(x, 1) > 0, tf.int64)
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(rows).prefetch(4)


def hand_written(strategy: Any, width: int) -> Any:
    """Returns a function that trains an epoch by a loop over TensorFlow's `ClusterCoordinator`."""
    import keras
    import tensorflow as tf

    coordinator = strategy.coordinator
    with strategy.scope():
        model = make_model(keras, width)
        variables = [v.value for v in model.trainable_variables]
        loss_sum, hits, count = (tf.Variable(0.0, trainable=False) for _ in range(3))

    @tf.function
    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(losses)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            with tf.device(variable.device):
                variable.assign_sub(0.01 * gradient)
        loss_sum.assign_add(tf.reduce_sum(losses))
        hits.assign_add(tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == y, tf.float32)))
        count.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

    iterator = iter(coordinator.create_per_worker_dataset(make_data))

    def epoch() -> None:
        for _ in range(STEPS):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        # Reads the metrics, as `fit` does at the end of an epoch.
        _ = loss_sum.numpy() / count.numpy(), hits.numpy() / count.numpy()

    return epoch


def timed_epochs(keras: Any, between: Any = None) -> tuple[Any, list[float]]:
    """Returns a callback that times epochs and then calls `between`, and its list of times."""
    seconds: list[float] = []
    begun = []

    def end(epoch, logs):
        seconds.append(time.perf_counter() - begun[-1])
        if between is not None:
            between()

    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begun.append(time.perf_counter()), on_epoch_end=end
    )
    return callback, seconds


def fit_and_loop(epochs: int, width: int, options: dict) -> dict[str, list[float]]:
    """Times epochs of `fit` and of a loop, in turn, on one cluster, without the first of each."""
    import keras

    import tfdml

    strategy = tfdml.ParameterServerStrategy(**options)
    with strategy.scope():
        model = compiled(keras, width)
    epoch, theirs = hand_written(strategy, width), []

    def loop():
        began = time.perf_counter()
        epoch()
        theirs.append(time.perf_counter() - began)

    callback, ours = timed_epochs(keras, loop)
    model.fit(
        make_data(), epochs=epochs + 1, steps_per_epoch=STEPS, verbose=0, callbacks=[callback]
    )
    return {"fit": ours[1:], "loop": theirs[1:]}


def fit_of_tf_keras(epochs: int, width: int, options: dict) -> dict[str, list[float]]:
    """Times the `fit` of Keras 2 under TensorFlow's own strategy."""
    import tensorflow as tf
    import tf_keras

    strategy = tf.distribute.ParameterServerStrategy(resolver())
    with strategy.scope():
        model = compiled(tf_keras, width)
    callback, seconds = timed_epochs(tf_keras)
    data = tf_keras.utils.experimental.DatasetCreator(make_data)
    model.fit(data, epochs=epochs + 1, steps_per_epoch=STEPS, verbose=0, callbacks=[callback])
    return {"tf_keras": seconds[1:]}


def resolver() -> Any:
    """Returns the cluster that TensorFlow's own strategy connects to."""
    import tensorflow as tf

    from tfdml.runtime.launch.supervisor import free_ports
    from tfdml.runtime.servers.server_link import ServerLink
    from tfdml.runtime.servers.server_task import task_from_environment

    task = task_from_environment()
    ServerLink(task, 60.0).wait_for_peers(120.0)  # `tfdml serve` waits for it.
    host = task.address.rpartition(":")[0]
    cluster = {**task.cluster, "chief": [f"{host}:{free_ports(1)[0]}"]}
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )


def beside_a_slow_worker(epochs: int, width: int, options: dict) -> dict[str, list[float]]:
    """Measures the rows per second that `fit` applies, without and with a slow worker 1."""
    import keras

    import tfdml

    strategy = tfdml.ParameterServerStrategy(**options)
    with strategy.scope():
        model = compiled(keras, width)
    callback, seconds = timed_epochs(keras)
    together = strategy.size if strategy.synchronous else 1
    data = make_data(rows=BATCH * together)
    used = BATCH * (together - strategy.backup_workers) * STEPS

    def rates() -> list[float]:
        seconds.clear()
        model.fit(data, epochs=epochs + 1, steps_per_epoch=STEPS, verbose=0, callbacks=[callback])
        return [used / s for s in seconds[1:]]

    even = rates()
    with slowed(task_process("worker", 1)):
        return {"even": even, "slow": rates()}


def pushes(epochs: int, width: int, options: dict) -> dict[str, list[float]]:
    """Measures the seconds of `fit`'s epochs, and the loopback bytes per step of all tasks."""
    import keras

    import tfdml

    strategy = tfdml.ParameterServerStrategy(**options)
    with strategy.scope():
        model = compiled(keras, width)
    sent: list[float] = []

    def count() -> None:
        sent.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)

    callback, seconds = timed_epochs(keras, count)
    model.fit(
        make_data(), epochs=epochs + 1, steps_per_epoch=STEPS, verbose=0, callbacks=[callback]
    )
    parts = [(after - before) / STEPS for before, after in itertools.pairwise(sent)]
    return {"seconds": seconds[1:], "bytes": parts}


def task_process(role: str, index: int) -> psutil.Process:
    """Returns the process of this machine that serves a task of this job."""
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    config = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
    for process in psutil.process_iter():
        try:
            found = process.environ().get("TF_CONFIG") == config
        except psutil.Error:
            continue
        if found and process.cmdline()[-1] == "serve" and "supervisor" not in process.cmdline()[2]:
            return process
    raise RuntimeError(f"no process serves {role} {index}")


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """Context manager: a process runs only part of the time.

    A separate process stops and resumes it: this one may wait for it while holding the GIL.

    Args:
        process: Process to slow down.
    """
    other = subprocess.Popen(module_command(__spec__.name, "slow", str(process.pid)))
    try:
        yield
    finally:
        other.kill()
        other.wait()
        process.send_signal(signal.SIGCONT)


def slow(pid: Annotated[int, typer.Argument(help="Of the process.")]) -> None:
    """Stops a process again and again."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PERIOD_SECONDS * (1 - 1 / SLOWER))
        os.kill(pid, signal.SIGCONT)
        time.sleep(PERIOD_SECONDS / SLOWER)


KINDS = {f.__name__: f for f in (fit_and_loop, fit_of_tf_keras, beside_a_slow_worker, pushes)}


def measure(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    epochs: Annotated[int, typer.Argument(help=f"Epochs of {STEPS} steps.")],
    width: Annotated[int, typer.Argument(help="Units of a layer.")],
    options: Annotated[str, typer.Argument(help="Of the strategy, as JSON.")],
) -> None:
    """Trains as the chief, and reports the measurements."""
    report(KINDS[kind](epochs, width, json.loads(options)))


if __name__ == "__main__":
    start(__doc__, measure, slow)
