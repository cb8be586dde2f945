"""Measures the accuracy of robust rules under attacks, beside ByzFL's on the same batches.

    python -m tools.bench.robust
    python -m tools.bench.robust --attack ALIE --attack "label flip"

25 workers train a small network on Fashion-MNIST, not IID: each honest one has one or two classes.
Five are wrong. tfdml's are 25 logical devices of one `MirroredStrategy`. The median and Krum, which
are known to fail, and the mean are ByzFL's; tfdml does not have the first two. Accuracies are
averaged over the last 100 steps, of which each differs. Results are kept by attack; `--report`
prints the table without a run.
"""

from pathlib import Path
from typing import Annotated

import typer

from tools.bench.figures import note, stored_rows
from tools.bench.harness import (
    BENCHMARKS,
    ROOT,
    check_choice,
    conditions,
    environment,
    module_command,
    result_of,
    start,
    threads_each,
)
from tools.bench.robust.attacks import ATTACKS

RESULTS = BENCHMARKS / "robust.json"
BYZFL = ROOT / ".venv-byzfl" / "bin" / "python"


def main(
    attack: Annotated[list[str] | None, typer.Option(help=", ".join(ATTACKS))] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 600,
    python: Annotated[Path, typer.Option(help="A Python that has ByzFL.")] = BYZFL,
    report: Annotated[bool, typer.Option(help="Only print the table of what is kept.")] = False,
) -> None:
    """Train under each attack, and print the table."""
    attacks = attack or list(ATTACKS)
    check_choice("--attack", attacks, ATTACKS)
    if not report and not python.exists():
        raise typer.BadParameter(
            f"`--python` must have ByzFL. Received: {python}, which does not exist. The test "
            f"tests/aggregation/test_byzfl.py makes {BYZFL.relative_to(ROOT)}."
        )
    rows = stored_rows(RESULTS)
    for name in [] if report else attacks:
        command = module_command("tools.bench.robust.job", name, str(steps), python=python)
        found = result_of(command, environment(threads_each(1)), timeout=None, progress=True)
        when = conditions(("tensorflow-cpu", "keras"), load=True)
        rows = [row for row in rows if row[0] != name]
        rows += [[name, *row, steps, when] for row in found]
        note(rows, RESULTS)
    print(_table(rows))


def _table(rows: list[list]) -> str:
    """Returns the table of the stored results: accuracies in percent, by rule and attack."""
    rules = list(dict.fromkeys((engine, rule) for _, engine, rule, *_ in rows))
    by_name = {(attack, engine, rule): value for attack, engine, rule, value, *_ in rows}
    attacks = [name for name in ATTACKS if any(row[0] == name for row in rows)]
    lines = [f"| rule | {' | '.join(attacks)} |", f"|---|{'---:|' * len(attacks)}"]
    for engine, rule in rules:
        values = [by_name.get((attack, engine, rule)) for attack in attacks]
        cells = ["" if value is None else f"{100 * value:.1f}" for value in values]
        lines.append(f"| {engine}: {rule} | {' | '.join(cells)} |")
    measured = {(row[-2], row[-1]) for row in rows}
    lines += [f"\n{steps} steps: {when}." for steps, when in sorted(measured)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    start(__doc__, main)
