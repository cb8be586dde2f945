"""Times steps of three ranks of unequal speed, with equal, given and measured parts of each batch.

    python -m tools.bench.batch_split
    python -m tools.bench.batch_split --batch 1320

The ranks' processes get CPU quotas of 0.6, 0.6 and 0.12 cores, by control groups (version 1 or 2)
of its own, so it needs root. The rate of each rank alone, under its quota and with its part of
a batch in proportion, is measured in jobs of one process; their sum is what a job could reach. The
period of the quotas is 10 ms: the kernel accepts no quota below 1 ms.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.harness import (
    conditions,
    environment,
    horovodrun,
    module_command,
    report,
    result_of,
    start,
)

QUOTAS = (0.6, 0.6, 0.12)
PERIOD = 10_000  # In µs.
STEPS = 6
# Parts in proportion to the quotas.
PARTS = (5, 5, 1)
# Epochs before the quotas, then until parts have settled, then those that are timed.
WARM, SETTLING, TIMED = 1, 6, 3
GROUPS = Path("/sys/fs/cgroup")
TIMEOUT = 580.0


def _limit(group: Path, cores: float) -> None:
    """Limits a control group to a number of cores."""
    quota = round(cores * PERIOD)
    if (GROUPS / "cgroup.controllers").exists():
        (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        return
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


@contextlib.contextmanager
def limited_groups() -> Iterator[list[Path]]:
    """Context manager: control groups with the quotas, in the ranks' order."""
    parent = GROUPS if (GROUPS / "cgroup.controllers").exists() else GROUPS / "cpu"
    groups = [parent / f"tfdml_bench_{os.getpid()}_{rank}" for rank in range(len(QUOTAS))]
    made = []
    try:
        for group, cores in zip(groups, QUOTAS, strict=True):
            group.mkdir()
            made.append(group)
            _limit(group, cores)
        yield groups
    finally:
        for group in made:
            _remove(group)


def _remove(group: Path) -> None:
    """Removes a control group whose processes are ending."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def run(group: Path, batch: int, batch_split: str) -> None:
    """Trains in this rank; rank 0 reports rows per second, the step time and the last parts.

    Args:
        group: Control group that this process enters after the first epoch.
        batch: Rows of a global batch.
        batch_split: Argument of the strategy, as JSON.
    """
    import keras
    import numpy as np

    import tfdml

    strategy = tfdml.HorovodStrategy(batch_split=json.loads(batch_split))
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * batch, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, len(x))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((28, 28, 1)),
                *(keras.layers.Conv2D(32, 3, activation="relu") for _ in range(3)),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)

    class Times(keras.callbacks.Callback):
        """Enters the control group, and times all steps of an epoch but the first."""

        def __init__(self):
            super().__init__()
            self.seconds: list[float] = []
            self.began = 0.0

        def on_train_batch_end(self, step, logs=None):
            """Begins the time after the first step, which may be traced."""
            if step == 0:
                float(logs["loss"])
                self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            """Notes the time of a step."""
            self.seconds.append((time.perf_counter() - self.began) / (STEPS - 1))
            if epoch + 1 == WARM:
                (group / "cgroup.procs").write_text(str(os.getpid()))

    times = Times()
    epochs = WARM + SETTLING + TIMED
    # Whole arrays fit in memory, and reading them takes no part of a quota worth mention.
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=[times])
    if strategy.is_chief:
        step = statistics.median(times.seconds[-TIMED:])
        weights = strategy.batch_weights or (1,) * strategy.size
        parts = [batch * weight / sum(weights) for weight in weights]
        first = times.seconds[WARM:]
        report({"rate": batch / step, "step": step, "parts": parts, "steps": first})


def _job(groups: list[Path], batch: int, batch_split: list[int] | str | None) -> dict:
    """Runs one job; returns what rank 0 has reported."""
    names = ",".join(map(str, groups))
    arguments = ["--groups", names, "--batch", str(batch), "--split", json.dumps(batch_split)]
    command = module_command(__spec__.name, *arguments)
    if len(groups) > 1:
        command = [*horovodrun("-np", str(len(groups))), *command]
    return result_of(command, environment(1), TIMEOUT)


def main(
    groups: Annotated[str, typer.Option(hidden=True, help="What a job starts.")] = "",
    batch: Annotated[int, typer.Option(help="Rows of a global batch.")] = 440,
    split: Annotated[str, typer.Option(hidden=True)] = "null",
) -> None:
    """Prints the table for the benchmarks' page."""
    if groups:
        rank = int(os.environ.get("HOROVOD_RANK", "0"))
        return run(Path(groups.split(",")[rank]), batch, split)
    print(f"Measured with {conditions(load=True)}.\n", flush=True)
    with limited_groups() as made:
        own = [batch * part // sum(PARTS) for part in PARTS]
        alone = [_job([made[i]], own[i], None)["rate"] for i in (1, 2)]
        alone = [alone[0], *alone]  # The first two have the same quota.
        print(f"rows/s alone: {', '.join(f'{rate:.1f}' for rate in alone)}; ", end="")
        print(f"sum {sum(alone):.1f}\n", flush=True)
        print("| `batch_split` | rows of the ranks | step, ms | rows/s | of the sum alone |")
        print("|---|---|---:|---:|---:|", flush=True)
        for given in (None, list(PARTS), "auto"):
            result = _job(made, batch, given)
            parts = ", ".join(f"{part:.0f}" for part in result["parts"])
            print(
                f"| {given} | {parts} | {1000 * result['step']:.0f} | {result['rate']:.1f} | "
                f"{result['rate'] / sum(alone):.0%} |",
                flush=True,
            )
    seconds = ", ".join(f"{1000 * step:.0f}" for step in result["steps"])
    print(f'\nms of a step, epoch by epoch, with "auto": {seconds}')
    print(f"Load at the end: {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    start(__doc__, main)
