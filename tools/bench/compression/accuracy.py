"""Measures the accuracy lost to each codec, with the network of `recipes/large_batch.py`.

    python -m tools.bench.compression.accuracy

Every codec by its name, so with its documented defaults; several optimizers, three seeds; the same
steps in one job of 2 processes. Each run is noted in a file, and not run again: the table may be
made in parts (`--only`, for optimizers or codecs). Remove the file where a codec, the recipe or the
numbers here have changed.
"""

import itertools
import statistics
from collections.abc import Callable
from typing import Annotated

import keras
import typer

import tfdml
from tools.bench.figures import note, spread, stored_rows
from tools.bench.harness import BENCHMARKS, conditions, report, run_job, start

LearningRate = Callable[[float], keras.optimizers.schedules.LearningRateSchedule]

# Names accepted by `compression`, and the points of accuracy that each may lose.
CODECS = {
    "none": 0.0,
    "fp16": 0.5,
    "bf16": 0.5,
    "int8": 0.5,
    "int4": 0.5,
    "natural": 0.5,
    "terngrad": 0.5,
    "powersgd": 0.5,
    "topk": 0.5,
    "randomk": 0.5,
    "onebit": 1.0,
    "dgc": 1.0,
}
# Learning rates that work without compression: plain SGD diverges at 0.5.
OPTIMIZERS: dict[str, Callable[[LearningRate], keras.Optimizer]] = {
    "SGD": lambda rate: keras.optimizers.SGD(rate(0.3)),
    "SGD, momentum 0.9": lambda rate: keras.optimizers.SGD(rate(0.05), momentum=0.9),
    "SGD, Nesterov 0.9": lambda rate: keras.optimizers.SGD(rate(0.05), momentum=0.9, nesterov=True),
    "Adam": lambda rate: keras.optimizers.Adam(rate(0.004)),
}
MOMENTUM = "SGD, momentum 0.9"
IMAGES, BATCH, EPOCHS, SEEDS = 20_000, 128, 6, (0, 1, 2)
STEPS = EPOCHS * -(-IMAGES // BATCH)
NOTED = BENCHMARKS / "compression_accuracy.json"


def trained(
    optimizer: str, codec: str, seed: int, callbacks: list[keras.callbacks.Callback] | None = None
) -> dict[str, list[float]]:
    """Trains once in this rank; returns the history of `fit`, one entry per epoch.

    Args:
        optimizer: One of `OPTIMIZERS`; its learning rate falls to 0.
        codec: One of `CODECS`.
        seed: Seed of the initial weights and the order of the images.
        callbacks: Callbacks of `fit`.
    """
    import images
    import large_batch

    data = images.load().limited(IMAGES)
    keras.utils.set_random_seed(seed)
    with tfdml.HorovodStrategy(compression=None if codec == "none" else codec).scope():
        model = large_batch.build_model(data.x.shape[1:], classes=10)
        model.compile(
            OPTIMIZERS[optimizer](
                lambda rate: keras.optimizers.schedules.PolynomialDecay(rate, STEPS, 0.0)
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model.fit(
        data.x, data.y, batch_size=BATCH, epochs=EPOCHS,
        validation_data=(data.x_val, data.y_val), validation_batch_size=2000,
        callbacks=callbacks, verbose=0,
    ).history  # fmt: skip


def fits(optimizer: str, codec: str) -> bool:
    """Returns whether a codec with its defaults supports an optimizer: DGC supports only one."""
    return codec != "dgc" or optimizer == MOMENTUM


def in_rank(only: list[str]) -> None:
    """Trains in this rank; rank 0 records the final accuracies."""
    import images

    rows = stored_rows(NOTED)
    chief = tfdml.HorovodStrategy().is_chief
    done = [tuple(row[:3]) for row in rows]
    optimizers = [name for name in OPTIMIZERS if name in only] or OPTIMIZERS
    codecs = [name for name in CODECS if name in only] or CODECS
    for optimizer, codec, seed in itertools.product(optimizers, codecs, SEEDS):
        if (optimizer, codec, seed) in done or not fits(optimizer, codec):
            continue
        rows.append([optimizer, codec, seed, trained(optimizer, codec, seed)["val_accuracy"][-1]])
        if chief:
            note(rows, NOTED)
    if chief:
        report({"data": images.load().name, "rows": rows})


def table(rows: list[list]) -> str:
    """Returns a Markdown table of each codec's gain or loss of accuracy."""
    found: dict[tuple[str, str], list[float]] = {}
    for optimizer, codec, _, accuracy in rows:
        found.setdefault((optimizer, codec), []).append(accuracy)
    optimizers = [name for name in OPTIMIZERS if (name, "none") in found]
    lines = [f"| | {' | '.join(optimizers)} | may lose |", "|---|" + "---|" * (len(optimizers) + 1)]
    for codec, allowed in CODECS.items():
        cells = []
        for optimizer in optimizers:
            values = found.get((optimizer, codec))
            if values is None:
                cells.append("not measured" if fits(optimizer, codec) else "not defined")
                continue
            base = statistics.mean(found[optimizer, "none"])
            lost = 100 * (statistics.mean(values) - base)
            text = f"{lost:+.2f}" if lost >= -allowed else f"**{lost:+.2f}**"
            cells.append(spread(values) + ("" if codec == "none" else f" {text}"))
        limit = "" if codec == "none" else f"{allowed}"
        lines.append(f"| {codec} | {' | '.join(cells)} | {limit} |")
    return "\n".join(lines)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Optimizers or codecs, by name.")] = None,
    rank: Annotated[bool, typer.Option(hidden=True, help="What a job starts.")] = False,
) -> None:
    """Measures what is missing, and prints the table of all results."""
    if rank:
        return in_rank(only or [])
    names = [*OPTIMIZERS, *CODECS]
    if unknown := set(only or []) - set(names):
        raise typer.BadParameter(f"`--only` must be of {', '.join(names)}. Received: {unknown}.")
    chosen = [part for name in only or [] for part in ("--only", name)]
    result = run_job(__spec__.name, "--rank", *chosen, timeout=3 * 3600)
    print(f"{result['data']}, {IMAGES:,} images, {STEPS} steps. Measured with {conditions()}.\n")
    print(table(result["rows"]))


if __name__ == "__main__":
    start(__doc__, main)
