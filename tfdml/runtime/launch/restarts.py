"""Restarts of a job that has failed, unless its script fails at the start in the same way twice."""

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Sequence

from tfdml.runtime.launch.rank_process import HorovodRank, RankProcess, explain, is_script_error

Failed = Sequence[RankProcess | HorovodRank]

# An attempt that took longer has trained: whatever ended it, a restart may help.
START_SECONDS = 120.0
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")


@dataclasses.dataclass(frozen=True)
class ScriptError:
    """An error of the script soon after its start.

    Attributes:
        code: Exit code of the rank to blame.
        kind: Class of its exception, "" if its last lines do not show it.
        continued: Epoch and step at which the attempt resumed; None if from the beginning.
    """

    code: int
    kind: str
    continued: str | None


def run_with_restarts(
    run: Callable[[], Failed],
    max_restarts: int,
    exit_code: Callable[[Failed], int],
    prepare: Callable[[], str] = str,
) -> int:
    """Runs a job until it succeeds, and returns its exit code.

    Args:
        run: Runs the job once; returns the processes that failed, the one to blame first.
        max_restarts: Maximum number of restarts.
        exit_code: Returns the job's exit code for the processes that failed.
        prepare: Prepares a restart; returns text for the message, such as ", on node1:4".
    """
    before = None
    for attempt in range(max_restarts + 1):
        began = time.monotonic()
        failed = run()
        if not failed:
            return 0
        _say(explain(failed))
        error = script_error(failed, time.monotonic() - began)
        if attempt < max_restarts and error is not None and error == before:
            _say(
                f"tfdml launch: {failed[0].label} failed in the same way twice at the start: an "
                f"error of the script, not restarted; its traceback is above."
            )
            break
        before = error
        if attempt < max_restarts:
            where = prepare()
            _say(f"tfdml launch: restart {attempt + 1} of {max_restarts}{where}.")
    return exit_code(failed)


def script_error(failed: Failed, seconds: float) -> ScriptError | None:
    """Returns the error that ended an attempt at its start; None if a restart may help.

    Two attempts that continued from the same checkpoint, or both from none, have made no progress.

    Args:
        failed: Processes that failed, the one to blame first.
        seconds: Seconds that the attempt took.
    """
    first = failed[0]
    if not is_script_error(first.code) or first.was_ended or seconds > START_SECONDS:
        return None
    continued = next((rank.continued for rank in failed if rank.continued), None)
    return ScriptError(first.code, _exception(first.last_lines), continued)


def _exception(lines: Sequence[str]) -> str:
    """Returns the class of the last exception whose traceback is in a rank's output."""
    kind, in_traceback = "", False
    for line in lines:
        if line == _TRACEBACK:
            in_traceback = True
        elif in_traceback and (found := _ERROR.match(line)):
            kind, in_traceback = found[1], False
    return kind


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
