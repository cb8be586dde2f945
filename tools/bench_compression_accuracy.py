"""Measures what compression costs in accuracy, by `recipes/large_batch.py`'s network: all codecs.

    .venv/bin/python tools/bench_compression_accuracy.py

Every codec by its name, so with its documented defaults; three seeds; the same steps of SGD with
momentum in one job of 2 processes. Each run is noted in a file, and not run again: the table may be
made in parts. Remove the file where a codec, the recipe or the numbers here have changed.
"""

import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
from bench_job import conditions, note, noted, report, run_job, spread

# The names that `compression` takes, and how many points each may lose.
ALLOWED = {
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
IMAGES, BATCH, EPOCHS, SEEDS = 20_000, 128, 6, (0, 1, 2)
NOTED = Path(__file__).with_name("benchmarks") / "compression_accuracy.json"


def run() -> None:
    """Trains in this rank; rank 0 reports the final accuracies."""
    import images
    import large_batch

    import tfdml

    dataset = images.load().limited(IMAGES)
    rows = noted(NOTED)
    done = [tuple(row[:2]) for row in rows]
    for seed in SEEDS:
        for name in ALLOWED:
            if (name, seed) in done:
                continue
            strategy = tfdml.HorovodStrategy(compression=None if name == "none" else name)
            history = large_batch.train(strategy, dataset, "sgd", BATCH, EPOCHS, seed, verbose=0)
            rows.append([name, seed, history["val_accuracy"][-1]])
            if strategy.is_chief:
                note(rows, NOTED)
    if strategy.is_chief:
        report({"data": dataset.name, "rows": rows})


def table(rows: list[list]) -> str:
    """Returns a Markdown table."""
    found: dict[str, list[float]] = {}
    for name, _, accuracy in rows:
        found.setdefault(name, []).append(accuracy)
    base = statistics.mean(found["none"])
    lines = [
        "| compression | validation accuracy, % (lowest–highest) | to none | allowed |",
        "|---|---|---|---|",
    ]
    for name, values in found.items():
        difference = 100 * (statistics.mean(values) - base)
        lines.append(f"| {name} | {spread(values)} | {difference:+.2f} | -{ALLOWED[name]} |")
    return "\n".join(lines)


def main(
    rank: Annotated[bool, typer.Option(hidden=True, help="What a job starts.")] = False,
) -> None:
    """Prints the table."""
    if rank:
        return run()
    result = run_job(__file__, "--rank", timeout=3 * 3600)
    steps = EPOCHS * -(-IMAGES // BATCH)
    print(f"{result['data']}, {IMAGES:,} images, {steps} steps. Measured with {conditions()}.\n")
    print(table(result["rows"]))


if __name__ == "__main__":
    typer.run(main)
