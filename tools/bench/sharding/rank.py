"""Rank of `tools.bench.sharding` with TensorFlow, on a host of the network lab."""

import sys
from typing import Annotated

import keras
import typer

import tfdml
from tools.bench.compression.model import GLOBAL_BATCH, WARM_UP, Clock
from tools.bench.compression.networks import data, mlp
from tools.bench.harness import report, start

OURS = {"without": None, "sharded": tfdml.Sharding(optimizer_state=True)}


class Timed:
    """A model in training, timed in rounds.

    Args:
        sharding: The strategy's argument.
    """

    def __init__(self, sharding: tfdml.Sharding | None):
        strategy = tfdml.HorovodStrategy(sharding=sharding)
        with strategy.scope():
            self.model = mlp()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(keras.optimizers.Adam(1e-4), loss)
        self._steps = Clock()
        self.model.fit(*data("mlp", WARM_UP), batch_size=GLOBAL_BATCH, verbose=0)

    def run(self, steps: int) -> None:
        """Times some steps; the first one of the call, which includes its checks, is left out."""
        clock = Clock()
        ticks = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: clock.start(),
            on_train_batch_end=lambda batch, logs: clock.tick(),
        )
        x, y = data("mlp", steps + 1)
        self.model.fit(x, y, batch_size=GLOBAL_BATCH, verbose=0, callbacks=[ticks])
        self._steps.rows += clock.rows[1:]

    def summary(self) -> dict[str, float]:
        """Returns medians of the steps, and the bytes of this rank's slots."""
        slots = sum(v.numpy().nbytes for v in self.model.optimizer.variables)
        return {**self._steps.summary(), "slots": slots}


def main(rounds: int, steps: int, rank: Annotated[int, typer.Option(envvar="NETLAB_RANK")]) -> None:
    """Times training with and without sharding in turns; rank 0 reports the results."""
    candidates = {name: Timed(sharding) for name, sharding in OURS.items()}
    for number in range(rounds):
        for name, candidate in candidates.items():
            candidate.run(steps)
            if rank == 0:
                print(number, name, candidate.summary(), file=sys.stderr, flush=True)
    if rank == 0:
        report({name: candidate.summary() for name, candidate in candidates.items()})


if __name__ == "__main__":
    start(__doc__, main)
