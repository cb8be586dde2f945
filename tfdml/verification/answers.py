"""The runs and comparisons of `tfdml verify`, and their answers."""

from typing import Any

from rich.console import Console

from tfdml.verification import report
from tfdml.verification.causes import cause_of
from tfdml.verification.comparing import compare
from tfdml.verification.refusals import cause_of_failure
from tfdml.verification.runs import RunFailed, Runs
from tfdml.verification.updates import compare_updates, show_updates, updates_as_dict


def answer_of(runs: Runs, console: Console) -> dict[str, Any]:
    """Compares a script on one process and on several; prints the answer, and returns it for JSON.

    Args:
        runs: The runs to make.
        console: Where to print.

    Raises:
        ValueError: If the script cannot be compared.
    """
    try:
        one = runs.alone()
    except RunFailed as failed:
        raise ValueError(f"SCRIPT must run on one process. Received: {failed.report()}") from failed
    try:
        comparison = compare(one, *runs.again_and_several(one))
    except RunFailed as failed:
        cause = cause_of_failure(failed.lines)
        report.show_cause(cause, console)
        return report.failure_as_dict(runs.replicas, cause)
    cause = cause_of(comparison)
    report.show(comparison, cause, console)
    return report.as_dict(comparison, cause)


def updates_of(runs: Runs, console: Console) -> dict[str, Any]:
    """Compares a script's codec with no codec; prints the answer, and returns it for JSON.

    Args:
        runs: The runs to make.
        console: Where to print.

    Raises:
        ValueError: If the script does not run, or does not compress.
    """
    try:
        compressed, uncompressed = runs.compressed_and_not(runs.alone())
    except RunFailed as failed:
        raise ValueError(f"SCRIPT must run. Received: {failed.report()}") from failed
    updates = compare_updates(compressed, uncompressed)
    show_updates(updates, compressed, console)
    return updates_as_dict(updates, compressed)
