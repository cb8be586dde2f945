"""Row of the report: rule, result and figures."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass
class Row:
    """Row of the report.

    Attributes:
        name: Subject of the check.
        rule: Requirement, as a sentence.
        figures: Measurements as text, by name.
        problems: Violations; a row without problems has passed.
        left_out: Reason why it could not be checked here; empty if it was.
    """

    name: str
    rule: str
    figures: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    left_out: str = ""

    @property
    def result(self) -> str:
        """Result: "pass", "FAIL" or "not applicable"."""
        if self.left_out:
            return "not applicable"
        return "FAIL" if self.problems else "pass"

    def require(self, holds: bool, problem: str) -> None:
        """Records a problem unless `holds`."""
        if not holds:
            self.problems.append(problem)

    def require_close(
        self, found: Sequence[float], expected: Sequence[float], tolerance: float, of: str
    ) -> None:
        """Records a problem unless all values are finite and within an absolute tolerance.

        Args:
            found: Values to check.
            expected: Expected values.
            tolerance: Largest allowed absolute difference of a value.
            of: Origin of `expected`, for the message.
        """
        largest = largest_difference(found, expected)
        self.figures[f"largest difference from {of}"] = f"{largest:.1e}"
        self.require(
            largest <= tolerance,
            f"numbers must be within {tolerance:g} of those of {of}, not {largest:.3g}",
        )

    def require_moved(self, before: Sequence[float], after: Sequence[float], least: float) -> None:
        """Records a problem unless training has changed a weight: otherwise equality is vacuous."""
        moved = largest_difference(before, after)
        self.figures["moved by"] = f"{moved:.2f}"
        self.require(moved > least, f"weights must move, not by {moved:.3g} only")


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest difference of two lists; infinity if they cannot be compared."""
    if len(found) != len(expected) or not all(map(math.isfinite, (*found, *expected))):
        return math.inf
    return max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=math.inf)
