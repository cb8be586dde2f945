"""Times training steps of a model with an embedding table, by its rows and its optimizer.

    python -m tools.bench.tables
    python -m tools.bench.tables --processes 2

A batch looks up 8 of the table's rows for each of 256 samples: the work that must be done is the
same for a table of ten thousand rows and one of ten million. Each optimizer trains the same model
under `HorovodStrategy`, one after the other in one process, or in two.
"""

import gc
import statistics
import time
from typing import Annotated

import typer

from tools.bench.harness import conditions, report, run_job, start

ROWS = (10_000, 100_000, 1_000_000, 10_000_000)
WIDTH, BATCH, LOOKUPS = 16, 256, 8
WARM_UP, STEPS = 5, 30
OPTIMIZERS = ("SGD", "Adagrad", "Adam", "tfdml RowWiseAdagrad", "tfdml LazyAdam")


def seconds_of_a_step(optimizer: str, rows: int) -> float:
    """Returns the median seconds of a step; every rank of a job calls this."""
    import keras
    import numpy as np

    import tfdml

    name = optimizer.removeprefix("tfdml ")
    module = keras.optimizers if name == optimizer else tfdml.optimizers
    strategy = tfdml.HorovodStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((LOOKUPS,), dtype="int32"),
                keras.layers.Embedding(rows, WIDTH, embeddings_initializer="zeros"),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(getattr(module, name)(0.01), "mse")
    rng = np.random.default_rng(0)
    x = rng.integers(0, rows, ((WARM_UP + STEPS) * BATCH, LOOKUPS), np.int32)
    y = rng.normal(size=(len(x), 1)).astype("float32")
    ends: list[float] = []
    ticks = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[ticks])
    ends = ends[WARM_UP:]
    return statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))


def run() -> None:
    """Times all optimizers and tables in this rank; rank 0 reports them."""
    import keras

    import tfdml

    found: dict[str, list[float]] = {}
    for rows in ROWS:
        for optimizer in OPTIMIZERS:
            found.setdefault(optimizer, []).append(seconds_of_a_step(optimizer, rows))
            keras.backend.clear_session()
            gc.collect()
    if tfdml.HorovodStrategy().is_chief:
        report(found)


def table(found: dict[str, list[float]]) -> str:
    """Returns the milliseconds of a step as a Markdown table."""
    lines = [
        f"| rows of the table | {' | '.join(f'{rows:,}' for rows in ROWS)} |",
        f"|---|{'---:|' * len(ROWS)}",
    ]
    for optimizer, seconds in found.items():
        lines.append(f"| {optimizer} | {' | '.join(f'{1000 * s:.2f}' for s in seconds)} |")
    return "\n".join(lines)


def main(
    processes: Annotated[int, typer.Option(min=1, help="Ranks.")] = 1,
    in_job: Annotated[bool, typer.Option("--in-job", hidden=True)] = False,
) -> None:
    """Prints the table for the benchmarks' page."""
    if in_job:
        return run()
    found = run_job(__spec__.name, "--in-job", processes=processes, timeout=1800)
    print(f"Measured with {conditions(load=True)}.\n\n{table(found)}")


if __name__ == "__main__":
    start(__doc__, main)
