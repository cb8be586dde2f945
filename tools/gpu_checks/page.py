"""Markdown page of the report."""

import shlex
from collections import Counter
from collections.abc import Sequence

from tools.bench.harness import conditions
from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row

ON_PROCESSORS = "Run on processors: logical CPUs in the place of GPUs"
PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod")


def page(rows: Sequence[Row], machine: Machine, command: Sequence[str]) -> str:
    """Returns the report as Markdown.

    Args:
        rows: Rows of the report.
        machine: Devices covered by the report.
        command: Command that produced it.
    """
    lines = [
        f"# {heading(machine)}",
        "",
        f"    {shlex.join(command)}",
        "",
        f"{in_words(rows)}. With {conditions(PACKAGES)}.",
        "",
        "| | what must hold | result | figures |",
        "|---|---|---|---|",
    ]
    for row in rows:
        figures = ", ".join(f"{name}: {value}" for name, value in row.figures.items())
        result = f"not applicable: {row.left_out}" if row.left_out else row.result
        lines.append(_cells(row.name, row.rule, result, figures))
    failed = [row for row in rows if row.problems and not row.left_out]
    if failed:
        lines += ["", "## What fails", ""]
        lines += [f"- **{row.name}**: {problem}" for row in failed for problem in row.problems]
    return "\n".join(lines) + "\n"


def heading(machine: Machine) -> str:
    """Returns the title of the page."""
    if machine.kind == "cpu":
        return ON_PROCESSORS
    kinds = Counter(device["kind"] or "GPU" for device in machine.look["devices"])
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"Run on GPUs: {counted or 'there is none'}"


def in_words(rows: Sequence[Row]) -> str:
    """Returns the numbers of passed, failed and inapplicable checks as text."""
    counts = Counter(row.result for row in rows)
    return f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['not applicable']} not here"


def _cells(*texts: str) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"
