"""Summary of a job's report: the first difference, and a line or two on each rank."""

from collections.abc import Sequence
from pathlib import Path

from tfdml.runtime.hang_report.first_difference import Difference
from tfdml.runtime.hang_report.rank_report import RankReport

# Characters of a summary: it is sent to all ranks.
_MOST_CHARACTERS = 100_000


def summarize(reports: Sequence[RankReport], difference: Difference | None, directory: Path) -> str:
    """Returns the summary of a report.

    Args:
        reports: Reports on all ranks, in their order.
        difference: The first difference, None if there is none.
        directory: The report's directory, the same on all machines.
    """
    first = f"{difference.sentence}." if difference else "no rank keeps another one waiting."
    lines = [f"first difference: {first}"]
    for report in reports:
        lines.append(f"rank {report.rank}: {report.where}")
        lines.append(f"  where: {report.activity}{_and(report.place)}")
        if report.state:
            lines.append(f"  state: {report.state}")
        if report.exchanges is None:
            continue
        open_ = [exchange for exchange in report.exchanges if exchange.is_open]
        lines += [f"  waits in: {exchange.name}, turn {exchange.turn}" for exchange in open_]
        if report.exchanges and not open_:
            last = report.exchanges[-1]
            lines.append(f"  last exchange: {last.name}, turn {last.turn}")
    lines.append(f"stacks and last exchanges of each rank, on its machine: {directory}")
    return "\n".join(lines)[:_MOST_CHARACTERS] + "\n"


def _and(place: str) -> str:
    return f"; {place}" if place else ""
