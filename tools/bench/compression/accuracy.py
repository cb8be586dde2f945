"""Measures the accuracy lost to each codec, with a network on images or a transformer on text.

    python -m tools.bench.compression.accuracy
    python -m tools.bench.compression.accuracy --training text

Every codec by its name, so with its documented defaults; several optimizers, three seeds; the same
steps in one job of 2 processes. Each run is noted in a file, and not run again: the table may be
made in parts (`--only`, for optimizers or codecs). Remove the file where a codec, the recipe or the
numbers here have changed.
"""

import itertools
from typing import Annotated

import typer

import tfdml
from tools.bench.compression.trainings import MOMENTUM, TRAININGS, Images, Text
from tools.bench.figures import note, stored_rows
from tools.bench.harness import BENCHMARKS, check_choice, conditions, report, run_job, start

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
SEEDS = (0, 1, 2)


def fits(optimizer: str, codec: str) -> bool:
    """Returns whether a codec with its defaults supports an optimizer: DGC supports only one."""
    return codec != "dgc" or optimizer == MOMENTUM


def in_rank(training: Images | Text, only: list[str]) -> None:
    """Trains in this rank; rank 0 records the results."""
    noted = BENCHMARKS / training.noted
    rows = stored_rows(noted)
    chief = tfdml.HorovodStrategy().is_chief
    done = [tuple(row[:3]) for row in rows]
    optimizers = [name for name in training.optimizers if name in only] or training.optimizers
    codecs = [name for name in CODECS if name in only] or CODECS
    for optimizer, codec, seed in itertools.product(optimizers, codecs, SEEDS):
        if (optimizer, codec, seed) in done or not fits(optimizer, codec):
            continue
        rows.append([optimizer, codec, seed, training.result(optimizer, codec, seed)])
        if chief:
            note(rows, noted)
    if chief:
        report({"data": training.data, "steps": training.steps, "rows": rows})


def table(training: Images | Text, rows: list[list]) -> str:
    """Returns a Markdown table of each codec's results, and their difference to no compression."""
    found: dict[tuple[str, str], list[float]] = {}
    for optimizer, codec, _, result in rows:
        found.setdefault((optimizer, codec), []).append(result)
    optimizers = [name for name in training.optimizers if (name, "none") in found]
    lines = [f"| | {' | '.join(optimizers)} | may lose |", "|---|" + "---|" * (len(optimizers) + 1)]
    for codec, allowed in CODECS.items():
        cells = []
        for optimizer in optimizers:
            values = found.get((optimizer, codec))
            if values is None:
                cells.append("not measured" if fits(optimizer, codec) else "not defined")
                continue
            base = None if codec == "none" else found[optimizer, "none"]
            cells.append(training.cell(values, base, allowed))
        limit = f"{allowed}" if allowed and isinstance(training, Images) else ""
        lines.append(f"| {codec} | {' | '.join(cells)} | {limit} |")
    return "\n".join(lines)


def main(
    training: Annotated[str, typer.Option(help=f"What is trained: {', '.join(TRAININGS)}.")] = (
        "images"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Optimizers or codecs, by name.")] = None,
    rank: Annotated[bool, typer.Option(hidden=True, help="What a job starts.")] = False,
) -> None:
    """Measures what is missing, and prints the table of all results."""
    check_choice("--training", training, TRAININGS)
    chosen = TRAININGS[training]
    if rank:
        return in_rank(chosen, only or [])
    names = [*chosen.optimizers, *CODECS]
    check_choice("--only", only or (), names)
    parts = [part for name in only or [] for part in ("--only", name)]
    result = run_job(__spec__.name, "--rank", "--training", training, *parts, timeout=3 * 3600)
    print(f"{result['data']}. {result['steps']} steps. Measured with {conditions()}.\n")
    print(table(chosen, result["rows"]))


if __name__ == "__main__":
    start(__doc__, main)
