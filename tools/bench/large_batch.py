"""Measures the accuracy of large batches by `recipes/large_batch.py`: optimizers, sizes, seeds.

    python -m tools.bench.large_batch --plot tools/benchmarks/large_batch.png
    python -m tools.bench.large_batch --search adamw   # rates around the recipe's

All runs are of one job of 2 processes, one after the other, and have the same number of epochs.
Each is noted in a file, and not run again: the table may be made in parts. Remove the file where
the recipe or the number of epochs has changed.
"""

import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.figures import note, spread, stored_rows
from tools.bench.harness import BENCHMARKS, conditions, report, run_job, start

BASELINE = ("sgd", 128)
LARGE = (4096, 8192)
SEEDS = (0, 1, 2)
# Factors of the learning rate in a search.
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
NOTED = BENCHMARKS / "large_batch.json"


def run(epochs: int, search: str) -> None:
    """Trains in this rank; rank 0 reports the final accuracies."""
    import images
    import large_batch

    import tfdml

    strategy = tfdml.HorovodStrategy()
    dataset = images.load()
    rows = [] if search else stored_rows(NOTED)
    done = [tuple(row[:3]) for row in rows]

    def accuracy(name: str, batch: int, seed: int, rate: float | None = None) -> None:
        if (name, batch, seed) in done:
            return
        history = large_batch.train(strategy, dataset, name, batch, epochs, seed, rate, verbose=0)
        # A search uses other seeds than the table.
        rows.append([name, batch, seed, rate, history["val_accuracy"][-1]])
        if strategy.is_chief:
            print(*rows[-1], file=sys.stderr, flush=True)
            if not search:
                note(rows, NOTED)

    if search:
        for batch in LARGE:
            for factor in FACTORS:
                rate = large_batch.RATES[search][batch >= 8192] * factor
                accuracy(search, batch, 100, rate)
    else:
        for seed in SEEDS:
            accuracy(*BASELINE, seed)
            for batch in LARGE:
                for name in large_batch.RATES:
                    if name != "sgd":
                        accuracy(name, batch, seed)
    if strategy.is_chief:
        report({"data": dataset.name, "rows": rows})


def table(rows: list[list]) -> tuple[str, dict[tuple[str, int], list[float]]]:
    """Returns a Markdown table, and the accuracies by optimizer and batch size."""
    found: dict[tuple[str, int], list[float]] = {}
    for name, batch, _, _, accuracy in rows:
        found.setdefault((name, batch), []).append(accuracy)
    base = statistics.mean(found[BASELINE])
    lines = [
        "| optimizer | batch | validation accuracy, % (lowest–highest) | to the baseline |",
        "|---|---|---|---|",
    ]
    for (name, batch), values in found.items():
        difference = 100 * (statistics.mean(values) - base)
        lines.append(f"| {name} | {batch:,} | {spread(values)} | {difference:+.2f} |")
    return "\n".join(lines), found


def draw(found: dict[tuple[str, int], list[float]], path: Path) -> None:
    """Draws the accuracies beside the baseline's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for name, _ in found if name != "sgd"))
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    base = statistics.mean(found[BASELINE])
    axes.axhline(100 * base, color="black", linewidth=1, label=f"SGD, batch {BASELINE[1]}")
    for position, batch in enumerate(LARGE):
        for i, name in enumerate(names):
            values = [100 * v for v in found[name, batch]]
            x = [i + 0.3 * (position - 0.5)] * len(values)
            label = f"batch {batch:,}" if i == 0 else None
            axes.plot(x, values, "o", color=f"C{position}", alpha=0.7, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("validation accuracy, %")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(
    epochs: Annotated[int, typer.Option(help="Epochs of each training.")] = 20,
    search: Annotated[str, typer.Option(help="Try rates for this optimizer instead.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw the accuracies into this file.")] = None,
    rank: Annotated[bool, typer.Option(hidden=True, help="What a job starts.")] = False,
) -> None:
    """Prints the table, and draws the picture."""
    if rank:
        return run(epochs, search)
    arguments = ["--rank", "--epochs", str(epochs), *(["--search", search] if search else [])]
    result = run_job(__spec__.name, *arguments, timeout=3 * 3600)
    print(f"{result['data']}, {epochs} epochs. Measured with {conditions()}.\n")
    if search:
        for name, batch, _, rate, accuracy in result["rows"]:
            print(f"{name} {batch} rate {rate:g}: {100 * accuracy:.2f} %")
        return
    text, found = table(result["rows"])
    print(text)
    if plot is not None:
        draw(found, plot)


if __name__ == "__main__":
    start(__doc__, main)
