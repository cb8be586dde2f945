"""Trains an MLP under `HorovodStrategy` with each codec, for `tools.gpu_checks`.

    horovodrun -np 2 python -m tools.gpu_checks.jobs.compressed --kind cpu

Rank 0 reports the losses by codec; ranks whose weights differ end the job.
"""

from typing import Annotated

import typer

from tools.bench.harness import report, start
from tools.gpu_checks.jobs import placement

ROWS, BATCH, INPUTS, HIDDEN, EPOCHS = 1920, 48, 64, 256, 3


def losses(codec) -> list[float]:
    """Trains a new model with a codec; returns the loss of each epoch."""
    import keras
    import numpy as np

    import tfdml

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, INPUTS)).astype("float32")
    y = (x @ rng.normal(size=INPUTS) > 0).astype("int32")
    strategy = tfdml.HorovodStrategy(compression=codec, check_desync=1)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((INPUTS,)), layers.Dense(HIDDEN, "tanh"), layers.Dense(2)]
        )
        # The momentum is that of `DeepGradientCompression`.
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return history.history["loss"]


def main(kind: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu") -> None:
    """Trains with each codec."""
    placement.one_card(kind, 1)
    placement.exact_products()
    import horovod.tensorflow as hvd

    from tools.bench.codecs import CODECS

    found = {repr(codec): losses(codec) for codec in CODECS}
    if hvd.rank() == 0:
        report(found)


if __name__ == "__main__":
    start(__doc__, main)
