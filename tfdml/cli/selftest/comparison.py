"""Comparison of a run of `tfdml test` with one process: losses, weights, and their verdict."""

import base64
import dataclasses
import enum
import itertools
import re
from collections.abc import Sequence

import numpy as np

from tfdml.cli.selftest.events import Event
from tfdml.cli.selftest.jobs import JOB_SECONDS, JobResult, StrategyRun
from tfdml.runtime.startup_noise import is_noise

_ERROR = re.compile(
    r"[\w.]*(Error|Exception|Interrupt)\b|tfdml: the job ends|tfdml launch: |\S*horovodrun: error"
)
# Prefix that the launcher or horovodrun adds to a rank's line.
_PREFIX = re.compile(r"^(\[[a-z ]*\d+\](<\w+>:)? ?)+")
_ERROR_LINES = 6


class Outcome(enum.Enum):
    """Outcome of a run."""

    RIGHT = "right"
    TRAINED = "loss fell"
    WRONG = "WRONG"
    FAILED = "FAILED"
    NOT_INSTALLED = "not installed"
    NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run, for the report.

    Attributes:
        run: Run that was judged.
        status: Outcome.
        replicas: Number of replicas.
        off_by: Largest difference of a loss or weight from that of one process.
        samples_per_second: Throughput of all replicas together.
        reason: Reason of a bad outcome, in a sentence.
        error: First lines of its error.
    """

    run: StrategyRun
    status: Outcome
    replicas: int = 0
    off_by: float | None = None
    samples_per_second: float = 0.0
    reason: str = ""
    error: Sequence[str] = ()

    @property
    def is_bad(self) -> bool:
        """True if the command must fail because of this result."""
        return self.status in (Outcome.WRONG, Outcome.FAILED)


def judge(
    run: StrategyRun, ended: JobResult, replicas: int, ranks: int, reference: Event | None
) -> RunResult:
    """Compares a run with training on one process.

    Args:
        run: Run to judge.
        ended: Result of its job.
        replicas: Number of replicas that train.
        ranks: Number of processes that report.
        reference: End of the run on one process; None for that run itself.
    """
    ends = sorted(
        (event for event in ended.events if event.run == run.name and event.is_end),
        key=lambda event: event.rank,
    )
    if ended.timed_out and len(ends) < ranks:
        return _failed(run, ended, f"it did not end within {JOB_SECONDS:.0f} s")
    if len(ends) < ranks:
        return _failed(run, ended, f"its job ended with exit code {ended.code}")
    first = ends[0]
    digests = [digest for event in ends for digest in event.digests]
    off_by = 0.0 if reference is None else _difference(first, reference)
    result = RunResult(run, Outcome.RIGHT, replicas, off_by, first.samples_per_second)
    if len(set(digests)) > 1:
        reason = "the weights are not bit-identical on all replicas"
        return dataclasses.replace(result, status=Outcome.WRONG, reason=reason)
    if any(event.losses != first.losses for event in ends):
        reason = "the ranks' histories do not have the same losses"
        return dataclasses.replace(result, status=Outcome.WRONG, reason=reason)
    if run.tolerance is None:
        if first.losses[-1] < first.losses[0]:
            return dataclasses.replace(result, status=Outcome.TRAINED, off_by=None)
        reason = f"the loss did not fall: it was {first.losses[0]:.4g}, then {first.losses[-1]:.4g}"
        return dataclasses.replace(result, status=Outcome.WRONG, reason=reason)
    if not off_by <= run.tolerance:  # Also for NaN.
        reason = (
            f"losses or weights differ from one process's by {off_by:.1e}; allowed are "
            f"{run.tolerance:.0e}"
        )
        return dataclasses.replace(result, status=Outcome.WRONG, reason=reason)
    return result


def error_lines(text: str) -> list[str]:
    """Returns the first lines of the error in a job's output: the exception without frames."""
    lines = [_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip() and not is_noise(line)]
    begins = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    chosen = lines[begins[0] :][:_ERROR_LINES] if begins else lines[-_ERROR_LINES:]
    # A traceback after the error is another rank's.
    of_one = itertools.takewhile(lambda line: not line.startswith("Traceback"), chosen)
    return [line[:300] for line in of_one]


def _failed(run: StrategyRun, ended: JobResult, reason: str) -> RunResult:
    return RunResult(run, Outcome.FAILED, reason=reason, error=error_lines(ended.errors))


def _difference(event: Event, reference: Event) -> float:
    """Returns the largest difference between two runs' losses and weights; NaN if any is NaN."""
    losses = np.abs(np.subtract(event.losses, reference.losses)).max()
    weights = np.abs(_weights(event) - _weights(reference)).max()
    return float(np.maximum(losses, weights))


def _weights(event: Event) -> np.ndarray:
    return np.frombuffer(base64.b64decode(event.weights), "<f4")
