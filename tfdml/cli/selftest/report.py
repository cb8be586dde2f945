"""Output of `tfdml test`: progress, a table and a verdict."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from tfdml.cli.selftest.comparison import Outcome, RunResult
from tfdml.cli.selftest.jobs import JOBS, REFERENCE, StrategyRun

_COLOURS = {
    Outcome.RIGHT: "green",
    Outcome.TRAINED: "green",
    Outcome.WRONG: "bold red",
    Outcome.FAILED: "bold red",
    Outcome.NOT_INSTALLED: "yellow",
    Outcome.NOT_RUN: "yellow",
}
# Relative speed below which a run is reported as slower than one process.
_SLOWER = 0.95


class RunDisplay:
    """Display of runs as they begin and end: a growing table on a terminal, otherwise lines.

    Args:
        console: Console to print on.
    """

    def __init__(self, console: Console):
        self._console = console
        self._results: list[RunResult] = []
        self._begun: set[str] = set()
        self._live = Live(console=console, transient=True, refresh_per_second=8)

    def __enter__(self) -> "RunDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def results(self) -> list[RunResult]:
        """Results of the runs so far."""
        return self._results

    def begin(self, run: StrategyRun, where: str) -> None:
        """Shows that a run begins; repeated calls are ignored.

        Args:
            run: Run that begins.
            where: Machines that it runs on, such as "on this machine".
        """
        if run.name in self._begun:
            return
        self._begun.add(run.name)
        line = f"{run.title}, {where}"
        if self._console.is_terminal:
            self._live.update(Group(table(self._results), Spinner("dots", line)))
        else:
            self._console.print(f"Training: {line}", markup=False)

    def end(self, result: RunResult) -> None:
        """Records the result of a run."""
        self._results.append(result)
        if self._console.is_terminal:
            self._live.update(table(self._results))


def table(results: Sequence[RunResult]) -> Table:
    """Returns the table of the runs that have ended, at most 80 columns wide.

    Args:
        results: Results of the runs, the reference first.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("Strategy", "Replicas", "Result", "Off by", "Samples/s", "Speed"):
        justify = "left" if heading in ("Strategy", "Result") else "right"
        made.add_column(heading, justify=justify, no_wrap=True)
    one = results[0].samples_per_second if results else 0.0
    for number, result in enumerate(results):
        rate = result.samples_per_second
        status = "reference" if not number and not result.is_bad else result.status.value
        made.add_row(
            result.run.label,
            str(result.replicas or ""),
            f"[{_COLOURS[result.status]}]{status}[/]",
            "" if result.off_by is None or not number else f"{result.off_by:.0e}",
            f"{rate:,.0f}" if rate else "",
            f"{rate / one:.2f}x" if rate and one else "",
        )
    return made


def explain(
    console: Console, results: Sequence[RunResult], commands: dict[str, Sequence[str]], hosts: str
) -> None:
    """Prints the table, its explanation and the verdict.

    Args:
        console: Console to print on.
        results: Results of all runs, the reference first.
        commands: Command of each run, by its name.
        hosts: Value of `--hosts`, or "".
    """
    console.print(table(results))
    console.print()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=False)

    say(
        "Right: losses and weights equal those of one process within 1e-04 (compressed: 1e-03), "
        "and weights are bit-identical on all replicas. Speed: samples/s against one process."
    )
    names = {result.run.name for result in results}
    if hosts and names & {"mirrored", "parameter_server"}:
        say("MirroredStrategy and ParameterServerStrategy ran on this machine alone.")
    slower = [
        result
        for result in results[1:]
        if result.samples_per_second
        and result.samples_per_second < _SLOWER * results[0].samples_per_second
    ]
    if slower and hosts:
        say(
            "Slower than one process: for so small a model the exchange takes longer than the "
            f"work it divides. To measure this network: tfdml bench --hosts {hosts}"
        )
    elif slower:
        say(
            "Slower than one process: all processes share this machine's "
            f"{psutil.cpu_count()} cores, which one process uses already."
        )
    for result in results:
        if result.status is Outcome.NOT_INSTALLED:
            say(f"{result.run.title} is not installed. To install it: tfdml build-horovod")
    bad = [result for result in results if result.is_bad]
    for result in bad:
        _explain_failure(console, result, commands[result.run.name])
    if bad:
        console.print(f"{len(bad)} of {len(results)} runs failed or are wrong.", style="bold red")
    else:
        everything = len(names) == sum(len(job.runs) for job in (REFERENCE, *JOBS))
        which = "installed" if everything else "tested"
        console.print(f"All {which} strategies train right here.", style="bold green")


def _explain_failure(console: Console, result: RunResult, command: Sequence[str]) -> None:
    name = result.run.title
    what = "failed" if result.status is Outcome.FAILED else "is wrong"
    console.print(f"{name} {what}: {result.reason}.", style="bold red", markup=False)
    for line in result.error:
        console.print(f"    {line}", markup=False, soft_wrap=True)
    if result.status is Outcome.FAILED:
        console.print("  To see all of its output:", markup=False)
    else:
        console.print(
            "  Run `tfdml doctor`, and look for another version of TensorFlow or Keras on one of "
            "the hosts. To repeat only this run:",
            markup=False,
        )
    console.print(f"    {shlex.join(command)}", markup=False, soft_wrap=True)


def write_json(path: Path, results: Sequence[RunResult], hosts: str) -> None:
    """Writes all results, and the versions they were obtained with, as JSON.

    Args:
        path: File to write.
        results: Results of all runs.
        hosts: Value of `--hosts`, or "".
    """
    rows = []
    for result in results:
        row = dataclasses.asdict(result)
        row |= {"run": result.run.name, "title": result.run.title}
        row |= {"status": result.status.value.lower(), "tolerance": result.run.tolerance}
        rows.append(row)
    written = {
        "versions": {name: _version(name) for name in ("tfdml", "keras", "horovod")},
        "hosts": hosts,
        "cores": psutil.cpu_count(),
        "runs": rows,
    }
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
