"""Counts the bytes of a step with divided tables if each rank also had the most frequent rows.

    python -m tools.bench.frequent_rows --ranks 4

The frequent rows of each table are those that 100 steps have looked up most often; the bytes are
those of the next 100. Ids are Zipf-distributed, as in `tools.bench.divided_tables`. A replicated
row is looked up without an exchange, but all ranks need the sum of its gradients in every step: by
an all-reduce of all replicated rows, because ranks do not know which of them the others looked up.
Nothing is timed, so this needs no network.
"""

from typing import Annotated

import numpy as np
import typer

from tools.bench.harness import start

ROWS, WIDTH, BATCH, STEPS = 1_000_000, 64, 1024, 100
EXPONENTS = (1.05, 1.2, 1.5)
REPLICATED = (0, 1, 10, 100, 1000)
_ID, _ROW = 4, 4 * WIDTH


def sent(ids: np.ndarray, replicated: np.ndarray, ranks: int) -> float:
    """Returns the bytes that a rank sends in a step for one table, on average over the ranks.

    Args:
        ids: The ids that each rank looks up: shape `[ranks, n]`.
        replicated: Ids of the rows that every rank has.
        ranks: Number of ranks; row i is on rank i modulo `ranks`.
    """
    exchanged = 0
    for rank, own in enumerate(ids):
        wanted = np.setdiff1d(own, replicated)
        # An id to the owner, the row back, its gradient to the owner.
        exchanged += np.count_nonzero(wanted % ranks != rank) * (_ID + 2 * _ROW)
    summed = 2 * (ranks - 1) / ranks * len(replicated) * _ROW
    return exchanged / ranks + summed


def main(ranks: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 4) -> None:
    """Prints the table for the benchmarks' page."""
    print("| exponent of Zipf's law | " + " | ".join(f"{n:,} rows" for n in REPLICATED) + " |")
    print("|---" * (len(REPLICATED) + 1) + "|")
    for exponent in EXPONENTS:
        rng = np.random.default_rng(0)
        ids = (rng.zipf(exponent, (2 * STEPS, ranks, BATCH // ranks)) * 7919) % ROWS
        found, counts = np.unique(ids[:STEPS], return_counts=True)
        by_frequency = found[np.argsort(-counts, kind="stable")]
        cells = []
        for number in REPLICATED:
            replicated = by_frequency[:number]
            bytes_sent = np.mean([sent(step, replicated, ranks) for step in ids[STEPS:]])
            cells.append(f"{bytes_sent / 1e3:.1f} KB")
        print(f"| {exponent} | {' | '.join(cells)} |")


if __name__ == "__main__":
    start(__doc__, main)
