"""Measures what fewer synchronizations cost in accuracy: LocalSGD, DiLoCo and post-local SGD.

    python -m tools.bench.local_updates.trial
    python -m tools.bench.local_updates.trial --only text --limit 1
    python -m tools.bench.local_updates.trial --report

One process plays all workers in turn. The trainings are those that show what codecs cost, on images
and on text: the same global batch, steps and learning rates for all methods. Each training is noted
in tools/benchmarks/local_updates.json, and not run again: the table may be made in parts. Remove
the file where a method or a training has changed. `--report` trains nothing: it writes the tables
into local_updates.md beside it.
"""

import itertools
import re
import statistics
import time
from typing import Annotated, NamedTuple

import keras
import typer

from tools.bench.figures import note, stored_rows
from tools.bench.harness import BENCHMARKS, check_choice, conditions, report, run_job, start
from tools.bench.local_updates.methods import METHODS, SYNCHRONOUS
from tools.bench.local_updates.workloads import WORKLOADS

NOTED = BENCHMARKS / "local_updates.json"
PAGE = BENCHMARKS / "local_updates.md"
WORKERS = (2, 4)
SEEDS = (0, 1, 2)


class Training(NamedTuple):
    """One training: the beginning of a stored row, which goes on with what was measured."""

    workload: str
    method: str
    workers: int
    seed: int


def trainings() -> list[Training]:
    """Returns all trainings in their order: all of one seed before the next."""
    found = []
    for seed, workload, method in itertools.product(SEEDS, WORKLOADS, METHODS):
        # Synchronous training is the same for any number of workers.
        counts = (1,) if method == SYNCHRONOUS else WORKERS
        found += [Training(workload, method, workers, seed) for workers in counts]
    return found


def missing(rows: list[list], only: list[str]) -> list[Training]:
    """Returns the trainings that are not stored yet.

    Args:
        rows: The stored rows.
        only: Workloads and methods to choose from; those of a kind that is not named are all.
    """
    done = {Training(*row[:4]) for row in rows}
    workloads = set(only) & set(WORKLOADS)
    methods = set(only) - workloads
    return [
        each
        for each in trainings()
        if each not in done
        and (not workloads or each.workload in workloads)
        and (not methods or each.method in methods)
    ]


def in_job(only: list[str], limit: int | None) -> None:
    """Trains what is missing, and stores each result."""
    rows = stored_rows(NOTED)
    for each in missing(rows, only)[:limit]:
        started, method = time.perf_counter(), METHODS[each.method]
        workload = WORKLOADS[each.workload]()
        result = workload.result(method, each.workers, each.seed)
        seconds = round(time.perf_counter() - started, 1)
        rows.append([*each, workload.exchanges(method), result, seconds])
        note(rows, NOTED)
        keras.backend.clear_session()
    report([row[:4] for row in rows])


# -- Tables ----------------------------------------------------------------------------------------


def table(workload: str, rows: list[list]) -> str:
    """Returns a Markdown table of a workload: results and their difference to synchronous ones."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    exchanges: dict[str, int] = {}
    for _, method, workers, seed, count, result, _ in (row for row in rows if row[0] == workload):
        found.setdefault((method, workers), {})[seed] = result
        exchanges[method] = count
    base = found[SYNCHRONOUS, 1]
    lines = [
        f"| {workload} | exchanges | {' | '.join(f'{workers} workers' for workers in WORKERS)} |",
        "|---|---:|" + "---|" * len(WORKERS),
    ]
    for name in METHODS:
        if name == SYNCHRONOUS:
            cells = [cell(workload, base, None)] * len(WORKERS)
        else:
            cells = [cell(workload, found.get((name, n), {}), base) for n in WORKERS]
        lines.append(f"| {name} | {exchanges.get(name, '')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(workload: str, results: dict[int, float], base: dict[int, float] | None) -> str:
    """Returns the results of all seeds as text.

    Args:
        workload: The workload; its results on images are fractions.
        results: Results by seed.
        base: Those of synchronous training; None if these are they.
    """
    if not results:
        return "not measured"
    factor, digits = (100, 2) if workload == "images" else (1, 3)
    values = [factor * value for value in results.values()]
    mean = statistics.mean(values)
    text = f"{mean:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"
    if base is not None:
        # Compared with the same seeds.
        peer = statistics.mean(factor * base[seed] for seed in results)
        difference = (
            f"{mean - peer:+.2f}" if workload == "images" else f"{100 * (mean / peer - 1):+.1f} %"
        )
        text = f"{text} {difference}"
    return text if len(results) == len(SEEDS) else f"{text}; seeds {', '.join(map(str, results))}"


def with_tables(page: str, tables: list[str]) -> str:
    """Returns a page with its tables of results, in their order, replaced by new ones."""
    new = iter(tables)
    pattern = r"^\| (?:images|text) \| exchanges \|.*\n(?:\|.*\n)*"
    return re.sub(pattern, lambda _: f"{next(new)}\n", page, flags=re.MULTILINE)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Workloads or methods, by name.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Train at most this often.")] = None,
    report_: Annotated[bool, typer.Option("--report", help="Write the tables instead.")] = False,
    job: Annotated[bool, typer.Option(hidden=True, help="What is started.")] = False,
) -> None:
    """Trains what is missing, or writes the tables."""
    names = [*WORKLOADS, *METHODS]
    check_choice("--only", only or (), names)
    if report_:
        tables = [table(workload, stored_rows(NOTED)) for workload in WORKLOADS]
        PAGE.write_text(with_tables(PAGE.read_text(), tables))
    elif job:
        in_job(only or [], limit)
    else:
        parts = [part for name in only or [] for part in ("--only", name)]
        parts += ["--limit", str(limit)] if limit else []
        run_job(__spec__.name, "--job", *parts, processes=1, timeout=3 * 3600)
        print(f"{len(missing(stored_rows(NOTED), []))} trainings are missing. {conditions()}")


if __name__ == "__main__":
    start(__doc__, main)
