"""Rank of `tools.bench.slow_networks --loss`: trains the small transformer to a given result.

After each part of the training, of whole rounds, the common weights are validated. This takes no
time here, nor does the first step, which traces.
"""

import sys
import time
from typing import Annotated

import keras
import numpy as np
import typer

import tfdml
from tools.bench.compression.model import sent_bytes
from tools.bench.compression.trainings import Text
from tools.bench.harness import report, start
from tools.bench.slow_networks.rank import has_local_updates

# Steps between two validations, or fewer: those of whole rounds.
PART = 50


class Watch(keras.callbacks.Callback):
    """Callback that adds up the seconds and bytes of the training steps.

    Attributes:
        seconds: Seconds of all steps but the first one.
        sent: Bytes that this host has sent in that time.
        steps: Number of steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.sent, self.steps = 0.0, 0, 0
        self._since: tuple[float, int] | None = None

    @staticmethod
    def _now() -> tuple[float, int]:
        return time.perf_counter(), sent_bytes()

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock, except before the first step."""
        self._since = self._now() if self.steps else None

    def on_train_batch_end(self, batch, logs=None):
        """Counts the step, and starts the clock after the first one."""
        self.steps += 1
        self._since = self._since or self._now()

    def on_test_begin(self, logs=None):
        """Stops the clock."""
        seconds, sent = self._now()
        self.seconds += seconds - self._since[0]
        self.sent += sent - self._since[1]


def methods(steps: int) -> dict[str, tuple[int, dict]]:
    """Returns each method's steps of a round, and its arguments of the strategy.

    Args:
        steps: Number of steps of a training.
    """
    found = {
        "every step": (1, {}),
        "every step, PowerSGD": (1, {"compression": tfdml.compression.PowerSGD(4)}),
    }
    if has_local_updates():
        updates = tfdml.local_updates
        post_local = updates.LocalSGD(sync_every=16, warmup_steps=steps // 2)
        found |= {
            "LocalSGD(16)": (16, {"local_updates": updates.LocalSGD(sync_every=16)}),
            "DiLoCo(50)": (50, {"local_updates": updates.DiLoCo(sync_every=50)}),
            "post-local SGD(16)": (16, {"local_updates": post_local}),
        }
    return found


def trained(training: Text, every: int, options: dict, bound: float) -> dict[str, float]:
    """Trains by a method until the bits per character are at most the bound.

    Args:
        training: The training, with its number of passes.
        every: Number of steps of a round.
        options: Arguments of the strategy.
        bound: Bits per character of text not seen.

    Returns:
        Whether it is "reached", the last result in "bits", and the "steps", "seconds" and bytes
        "sent" until then.
    """
    import transformer

    (x, y, classes), held_out, rows = training.samples()
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    order = np.concatenate([held_out + random.permutation(rows) for _ in range(training.epochs)])
    with tfdml.HorovodStrategy(**options).scope():
        model = transformer.build_model(classes, training.width)
        model.compile(
            training.optimizers["Adam"](training.schedule),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[transformer.BitsPerCharacter()],
        )
    watch, bits = Watch(), float("inf")
    size = training.batch * every * max(1, PART // every)
    for first in range(0, len(order), size):
        own = order[first : first + size]
        bits = model.fit(
            x[own], y[own], batch_size=training.batch, shuffle=False, callbacks=[watch], verbose=0,
            validation_data=(x[:held_out], y[:held_out]), validation_batch_size=256,
        ).history["val_bits"][-1]  # fmt: skip
        if bits <= bound:
            break
    found = {"reached": bits <= bound, "bits": bits, "steps": watch.steps}
    return found | {"seconds": watch.seconds, "sent": watch.sent}


def main(
    bound: float,
    passes: int,
    names: str,
    rank: Annotated[int, typer.Option(envvar="NETLAB_RANK")],
) -> None:
    """Trains by methods, separated by semicolons, to a bound in bits per character.

    Rank 0 reports the results.
    """
    training = Text()
    training.epochs = passes
    if not has_local_updates() and rank == 0:
        print("This tfdml has no local updates: their rows are left out.", file=sys.stderr)
    found = []
    known = methods(training.steps)
    for method in (name for name in names.split(";") if name in known):
        every, options = known[method]
        found.append({"method": method, **trained(training, every, options, bound)})
        if rank == 0:
            print(found[-1], file=sys.stderr, flush=True)
        keras.backend.clear_session()
    if rank == 0:
        report(found)


if __name__ == "__main__":
    start(__doc__, main)
