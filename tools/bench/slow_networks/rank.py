"""Rank of `tools.bench.slow_networks` with TensorFlow, on a host of the network lab.

Candidates of tfdml train under `model.fit`. Their local step is that of plain Keras's `fit` on a
rank's rows; that of Horovod's candidates is the step of a hand-written loop.
"""

import importlib.util
import statistics
import sys
from collections.abc import Callable
from typing import Annotated

import keras
import tensorflow as tf
import typer

import tfdml
from tfdml import compression
from tools.bench.compression.exchange import whole_exchange
from tools.bench.compression.model import GLOBAL_BATCH, Clock
from tools.bench.compression.networks import NETWORKS, data
from tools.bench.compression.rank import loss
from tools.bench.harness import report, start
from tools.bench.slow_networks.model import (
    AUTO,
    CANDIDATES,
    EVERY_STEP,
    FOUR_BITS,
    MOST_ALONE,
    NONE,
    POWER_SGD,
    TIMED_ALONE,
    WARM_UP,
    Candidate,
    mean_of,
    rounds_of,
    seconds_of,
    timed_rounds,
)

CODECS: dict[str, Callable[[], compression.Compressor | None]] = {
    NONE: lambda: None,
    POWER_SGD: lambda: compression.PowerSGD(4),
    FOUR_BITS: lambda: compression.QSGD(bits=4),
    AUTO: compression.Auto,
}
OPTIMIZERS: dict[str, Callable[[], keras.Optimizer]] = {
    "mlp": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "text": lambda: keras.optimizers.Adam(1e-3),
}


def has_local_updates() -> bool:
    """Returns whether this tfdml trains with local updates."""
    return importlib.util.find_spec("tfdml.local_updates") is not None


def agree(value: float) -> float:
    """Returns the mean of all ranks' numbers."""
    import horovod.tensorflow as hvd

    return float(hvd.allreduce(tf.constant(value, tf.float64), op=hvd.Average, name="agree"))


def compiled(network: str) -> keras.Model:
    """Returns the compiled model."""
    model = NETWORKS[network][0]()
    model.compile(OPTIMIZERS[network](), loss())
    return model


def fitted(
    model: keras.Model, network: str, rows: int, warm_up: int, steps: int
) -> dict[str, float]:
    """Returns `mean_of` the last steps of an epoch of `fit`, to the end of the epoch.

    Args:
        model: A compiled model.
        network: Its name.
        rows: Rows of a batch.
        warm_up: Number of steps before the counted ones, in the same epoch.
        steps: Number of counted steps.
    """
    clock = Clock()

    def begin(batch: int, logs: dict | None) -> None:
        # Not at the end of the step before: an exchange may follow that.
        if batch == warm_up:
            clock.rows.clear()
            clock.start()

    ticks = keras.callbacks.LambdaCallback(
        on_train_batch_begin=begin,
        on_train_batch_end=lambda batch, logs: clock.tick(),
        on_epoch_end=lambda epoch, logs: clock.tick(),
    )
    wanted = rows * (warm_up + steps)
    x, y = (array[:wanted] for array in data(network, -(-wanted // GLOBAL_BATCH)))
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=[ticks])
    return mean_of(clock.rows, steps)


class Keras:
    """What candidates of tfdml are measured with.

    Args:
        network: Name of the network.
        hosts: Number of hosts, with a rank each.
    """

    def __init__(self, network: str, hosts: int) -> None:
        self._network, self._rows = network, GLOBAL_BATCH // hosts
        # Horovod is initialized by it.
        tfdml.HorovodStrategy()

    def alone(self) -> float:
        """Returns the seconds of a step of plain Keras, without any exchange."""
        model = compiled(self._network)
        agree(0.0)
        with tfdml.alone():
            found = fitted(model, self._network, self._rows, WARM_UP, MOST_ALONE)
        return agree(found["seconds"])

    def exchange(self, codec: str) -> float:
        """Returns the seconds of an exchange, without steps."""
        return seconds_of(whole_exchange(self._network, CODECS[codec]()), agree)

    def run(self, candidate: Candidate, rounds: int) -> dict[str, float]:
        """Returns the means of a candidate's steps under `fit`."""
        options = {"compression": CODECS[candidate.codec]()}
        if candidate.method != EVERY_STEP:
            kind = getattr(tfdml.local_updates, candidate.method)
            options["local_updates"] = kind(sync_every=candidate.every)
        with tfdml.HorovodStrategy(**options).scope():
            model = compiled(self._network)
        steps = rounds * candidate.every
        return fitted(model, self._network, GLOBAL_BATCH, candidate.warm_up, steps)


class Loop:
    """What candidates of Horovod are measured with: a loop that averages the weights.

    Args:
        network: Name of the network.
        hosts: Number of hosts, with a rank each.
    """

    def __init__(self, network: str, hosts: int) -> None:
        import horovod.tensorflow as hvd

        hvd.init()
        model, loss_function = NETWORKS[network][0](), loss()
        optimizer = OPTIMIZERS[network]()
        weights = model.trainable_variables
        optimizer.build(weights)
        x, y = (tf.constant(array[: GLOBAL_BATCH // hosts]) for array in data(network, 1))

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                value = loss_function(y, model(x, training=True))
            optimizer.apply(tape.gradient(value, weights), weights)

        @tf.function
        def average() -> None:
            own = [tf.convert_to_tensor(weight) for weight in weights]
            means = hvd.grouped_allreduce(own, op=hvd.Average)
            for weight, mean in zip(weights, means, strict=True):
                weight.assign(mean)

        self._step, self._average = step, average

    def alone(self) -> float:
        """Returns the seconds of a step without any exchange."""
        return seconds_of(self._step, agree)

    def exchange(self, codec: str) -> float:
        """Returns the seconds in which weights are averaged, without steps."""
        del codec
        return seconds_of(self._average, agree)

    def run(self, candidate: Candidate, rounds: int) -> dict[str, float]:
        """Returns the means of a candidate's steps."""
        done = 0

        def step() -> None:
            nonlocal done
            self._step()
            done += 1
            if done % candidate.every == 0:
                self._average()

        return timed_rounds(step, candidate, rounds)


def main(
    names: str,
    rank: Annotated[int, typer.Option(envvar="NETLAB_RANK")],
    hosts: Annotated[int, typer.Option(envvar="NETLAB_RANKS")],
    network: str = "mlp",
) -> None:
    """Times candidates of one framework, separated by semicolons; rank 0 reports the results."""
    candidates = [CANDIDATES[name] for name in names.split(";")]
    if not has_local_updates():
        left_out = [c for c in candidates if c.framework == "tfdml" and c.method != EVERY_STEP]
        candidates = [c for c in candidates if c not in left_out]
        if left_out and rank == 0:
            said = ", ".join(c.name for c in left_out)
            print(f"This tfdml has no local updates. Left out: {said}.", file=sys.stderr)
    framework = CANDIDATES[names.split(";")[0]].framework
    measured = (Keras if framework == "tfdml" else Loop)(network, hosts)
    alone = [measured.alone()]
    codecs = TIMED_ALONE if framework == "tfdml" else (NONE,)
    exchanges = {codec: measured.exchange(codec) for codec in codecs}
    results = {}
    for candidate in candidates:
        # "auto" is assumed to choose the fastest.
        exchange = exchanges.get(candidate.codec, min(exchanges.values()))
        rounds = rounds_of(candidate.every, alone[0], exchange)
        results[candidate.name] = measured.run(candidate, rounds)
        if rank == 0:
            print(candidate.name, results[candidate.name], file=sys.stderr, flush=True)
        keras.backend.clear_session()
    # Before and after: the speed of a machine that is shared changes.
    alone.append(measured.alone())
    base = {"alone": statistics.mean(alone), "alone each": alone, "exchanges": exchanges}
    base["parameters"] = NETWORKS[network][0]().count_params()
    if rank == 0:
        report({"bases": {framework: base}, "results": results})


if __name__ == "__main__":
    start(__doc__, main)
