"""Trains a small CNN for `tools.gpu_checks`, under a strategy or none, in each numeric variant.

    python -m tools.gpu_checks.jobs.train plain
    python -m tools.gpu_checks.jobs.train mirrored --devices 2
    horovodrun -np 2 python -m tools.gpu_checks.jobs.train horovod

All processes, under whatever strategy, train on the same rows; rank 0 reports the weights.
"""

import contextlib
from typing import Annotated

import typer

from tools.bench.harness import report, start
from tools.gpu_checks.jobs import placement

# By variant: the policy, and whether XLA compiles the step.
VARIANTS = {
    "float32": ("float32", False),
    "mixed_float16": ("mixed_float16", False),
    "mixed_bfloat16": ("mixed_bfloat16", False),
    "XLA": ("float32", True),
}
# No batch divides by two: local batches are uneven, and one of the last batch is empty.
ROWS, BATCH, EPOCHS, CLASSES = 46, 15, 2, 3
# Loss scales far from the limit: near the largest float16, an overflow depends on the number of
# rows that a replica sums.
TOO_LARGE, SMALL = 2.0**40, 2.0**4


def make_strategy(name: str, kind: str, devices: int, split: bool, cards: int, exchange: str):
    """Returns a strategy, None for plain Keras; must be called before TensorFlow is used."""
    if name in ("plain", "mirrored"):
        placement.prepare(kind)
        own = placement.devices(kind, devices, split)
    else:
        placement.one_card(kind, cards)
        placement.exact_products()
    import tensorflow as tf

    import tfdml

    if name == "mirrored":
        nccl = tf.distribute.NcclAllReduce() if exchange == "nccl" else None
        return tfdml.MirroredStrategy(own, cross_device_ops=nccl)
    if name == "horovod":
        return tfdml.HorovodStrategy(check_desync=1)
    if name == "multi_worker":
        how = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation[exchange.upper()]
        )
        return tfdml.MultiWorkerMirroredStrategy(communication_options=how, check_desync=1)
    return None


def trained(strategy, variant: str) -> dict:
    """Trains in a strategy's scope; returns weights before and after, losses, loss scales."""
    import keras
    import numpy as np

    policy, by_xla = VARIANTS[variant]
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8, 8, 1)).astype("float32")
    y = rng.integers(0, CLASSES, ROWS)
    layers = keras.layers
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                # Nothing jumps: where cuDNN rounds a float16 otherwise, a maximum may be another
                # value, whose kernel gets the gradient.
                layers.Conv2D(4, 3, activation="tanh"),
                layers.AveragePooling2D(2),
                layers.Flatten(),
                layers.Dense(16, activation="tanh"),
                layers.Dense(CLASSES, dtype="float32"),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=TOO_LARGE, dynamic_growth_steps=2
            )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=by_xla)
    before, scales = flat(model.get_weights()), []
    if policy == "mixed_float16":
        # First a step that overflows however the batch is split, then a growing loss scale.
        model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        scales.append(float(model.optimizer.dynamic_scale))
        model.optimizer.dynamic_scale.assign(SMALL)
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    if scales:
        scales.append(float(model.optimizer.dynamic_scale))
    return {
        "before": before,
        "weights": flat(model.get_weights()),
        "losses": history.history["loss"],
        "scales": scales,
    }


def flat(arrays) -> list[float]:
    """Returns all values of the arrays in one list."""
    import numpy as np

    return np.concatenate([a.ravel() for a in arrays]).astype(float).tolist()


def main(
    strategy: Annotated[str, typer.Argument(help="plain, mirrored, horovod or multi_worker.")],
    kind: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
    devices: Annotated[int, typer.Option(help="Devices of this process.")] = 1,
    split: Annotated[bool, typer.Option("--split", help="They are parts of one card.")] = False,
    cards: Annotated[int, typer.Option(help="Cards that the ranks use.")] = 1,
    exchange: Annotated[str, typer.Option(help="auto, ring or nccl.")] = "auto",
    variant: Annotated[list[str], typer.Option(help="All by default.")] = list(VARIANTS),  # noqa: B006
) -> None:
    """Trains each variant."""
    made = make_strategy(strategy, kind, devices, split, cards, exchange)
    results = {name: trained(made, name) for name in variant}
    if made is None or made.is_chief:
        report(results)


if __name__ == "__main__":
    start(__doc__, main)
