"""Measures the bytes and time to reach a validation accuracy on a network, for each codec.

    python -m tools.bench.compression.target --rate 1gbit

The training of `tools.bench.compression.accuracy` on 2 hosts of `tools/netlab` (root needed), one
seed, to the end of the first epoch with that accuracy. Without the time that validation takes.
"""

import time
from typing import Annotated

import keras
import typer

from tools.bench.compression.accuracy import CODECS
from tools.bench.compression.model import RATES, sent_bytes
from tools.bench.compression.trainings import MOMENTUM, Images
from tools.bench.harness import check_choice, conditions, report, run_on_hosts, start

TARGET = 0.85


class UntilTarget(keras.callbacks.Callback):
    """Callback that adds up time and bytes, and stops training at the target accuracy.

    Attributes:
        seconds: Seconds of training, without its first step, which traces.
        sent: Bytes sent by this host in that time.
        epochs: Number of epochs done.
        reached: Whether the target accuracy has been reached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.sent, self.epochs, self.reached = 0.0, 0, 0, False
        self._since: tuple[float, int] | None = None

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock, except before the first step."""
        self._since = (time.perf_counter(), sent_bytes()) if epoch else None

    def on_train_batch_end(self, batch, logs=None):
        """Starts the clock after the first step."""
        self._since = self._since or (time.perf_counter(), sent_bytes())

    def on_test_begin(self, logs=None):
        """Stops the clock."""
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since[0]
            self.sent += sent_bytes() - self._since[1]

    def on_epoch_end(self, epoch, logs=None):
        """Checks the accuracy."""
        self.epochs, self.reached = epoch + 1, logs["val_accuracy"] >= TARGET
        self.model.stop_training = self.reached


def in_rank(host: int) -> None:
    """Trains in this rank, with one codec after the other; rank 0 reports time and bytes."""
    rows = []
    for codec in CODECS:
        watch = UntilTarget()
        Images().history(MOMENTUM, codec, 0, [watch])
        rows.append([codec, watch.reached, watch.epochs, watch.seconds, watch.sent])
        keras.backend.clear_session()
    if host == 0:
        report(rows)


def table(rows: list[list]) -> str:
    """Returns a Markdown table."""
    lines = [
        "| compression | epochs | MB sent | seconds | of none's |",
        "|---|---:|---:|---:|---:|",
    ]
    base = next(seconds for codec, _, _, seconds, _ in rows if codec == "none")
    for codec, reached, epochs, seconds, sent in rows:
        until = f"{epochs}" if reached else f"not in {epochs}"
        lines.append(
            f"| {codec} | {until} | {sent / 1e6:.1f} | {seconds:.1f} | {seconds / base:.2f} |"
        )
    return "\n".join(lines)


def main(
    rate: Annotated[str, typer.Option(help="100mbit, 1gbit, 10gbit.")] = "1gbit",
    host: Annotated[int | None, typer.Option(envvar="NETLAB_HOST", hidden=True)] = None,
) -> None:
    """Prints the table of one network."""
    if host is not None:
        return in_rank(host)
    check_choice("--rate", rate, RATES)
    rows = run_on_hosts(__spec__.name, hosts=2, rate=rate, job="horovod", progress=True)
    print(f"To {100 * TARGET:.0f} % at {rate or 'no limit'}, {MOMENTUM}. {conditions()}.\n")
    print(table(rows))


if __name__ == "__main__":
    start(__doc__, main)
