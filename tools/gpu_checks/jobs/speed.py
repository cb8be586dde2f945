"""Trains an MLP for `tools.gpu_checks` under a strategy of ours or under its stock peer.

    python -m tools.gpu_checks.jobs.speed mirrored --side ours --devices 2
    tfdml launch --workers 2 -- -m tools.gpu_checks.jobs.speed multi_worker --side stock

Rank 0 reports images a second, the process's peak memory, and the weights at the end. Peers: Keras
in `tf.distribute.MirroredStrategy`, and loops written by hand for Horovod and for
`tf.distribute.MultiWorkerMirroredStrategy`, under which `fit` of Keras 3 does not run.
"""

import resource
import time
from typing import Annotated

import typer

from tools.bench.harness import report, start
from tools.gpu_checks.jobs import placement, stock

# By kind: units of a hidden layer, and rows of a global batch.
SIZES = {"cpu": (512, 128), "gpu": (4096, 4096)}
STEPS, INPUTS, CLASSES, RATE = 20, 784, 10, 0.05
# How many of an array's weights are compared.
SAMPLE = 300


def data(rows: int):
    """Returns all steps' images and labels: noise."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * rows, INPUTS)).astype("float32")
    return x, rng.integers(0, CLASSES, len(x))


def initial(hidden: int) -> list:
    """Returns the common initial weights: kernels and biases, layer by layer."""
    import numpy as np

    rng = np.random.default_rng(1)
    widths = [INPUTS, hidden, hidden, CLASSES]
    pairs = [
        (rng.normal(0, a**-0.5, (a, b)).astype("float32"), np.zeros(b, "float32"))
        for a, b in zip(widths, widths[1:], strict=False)
    ]
    return [array for pair in pairs for array in pair]


def by_fit(strategy, hidden: int, rows: int) -> tuple[list, float]:
    """Trains two epochs by `fit`; returns the weights and the seconds of the second one."""
    import keras

    x, y = data(rows)
    dense = keras.layers.Dense
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((INPUTS,)),
                dense(hidden, "relu"),
                dense(hidden, "relu"),
                dense(CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss)
        model.set_weights(initial(hidden))
    for _ in range(2):
        began = time.perf_counter()
        model.fit(x, y, batch_size=rows, epochs=1, shuffle=False, verbose=0)
        seconds = time.perf_counter() - began
    return model.get_weights(), seconds


def trained(strategy: str, side: str, kind: str, devices: int, cards: int):
    """Trains; returns whether this is rank 0, the weights and the seconds of an epoch."""
    hidden, rows = SIZES[kind]
    if strategy == "mirrored":
        placement.prepare(kind)
        own = placement.devices(kind, devices)
    else:
        placement.one_card(kind, cards)
        placement.exact_products()
    import tensorflow as tf

    import tfdml

    if side == "ours":
        options = tf.distribute.experimental.CommunicationOptions
        ring = options(implementation=stock.implementation(kind, cards))
        made = {
            "mirrored": lambda: tfdml.MirroredStrategy(own),
            "horovod": tfdml.HorovodStrategy,
            "multi_worker": lambda: tfdml.MultiWorkerMirroredStrategy(communication_options=ring),
        }[strategy]()
        return made.is_chief, *by_fit(made, hidden, rows)
    if strategy == "mirrored":
        return True, *by_fit(tf.distribute.MirroredStrategy(own), hidden, rows)
    make = stock.horovod if strategy == "horovod" else stock.multi_worker
    peer = make(kind, cards, initial(hidden), RATE)
    return peer.rank == 0, *stock.by_hand(peer, *data(rows), rows)


def sample(weights: list) -> list[float]:
    """Returns a sample of each array's values."""
    return [float(w) for array in weights for w in array.ravel()[:: array.size // SAMPLE + 1]]


def peak(kind: str) -> int:
    """Returns this process's peak memory in bytes: of its GPU, or resident."""
    if kind == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def main(
    strategy: Annotated[str, typer.Argument(help="mirrored, horovod or multi_worker.")],
    side: Annotated[str, typer.Option(help="ours or stock.")] = "ours",
    kind: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
    devices: Annotated[int, typer.Option(help="Devices of this process.")] = 1,
    cards: Annotated[int, typer.Option(help="Cards that the ranks use.")] = 1,
) -> None:
    """Trains, and reports."""
    is_first, weights, seconds = trained(strategy, side, kind, devices, cards)
    if is_first:
        hidden, rows = SIZES[kind]
        report(
            {
                "images": STEPS * rows / seconds,
                "peak": peak(kind),
                "before": sample(initial(hidden)),
                "weights": sample(weights),
            }
        )


if __name__ == "__main__":
    start(__doc__, main)
