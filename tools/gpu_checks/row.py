"""A line of the report: what must hold, whether it does, and the figures."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass
class Row:
    """A line of the report.

    Attributes:
        name: What is checked.
        rule: What must hold, as a sentence.
        figures: What was measured, by name, in words.
        problems: What does not hold; a row without problems has passed.
        left_out: Why it could not be checked here; empty if it was.
    """

    name: str
    rule: str
    figures: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    left_out: str = ""

    @property
    def result(self) -> str:
        """One of "pass", "FAIL" and "not applicable"."""
        if self.left_out:
            return "not applicable"
        return "FAIL" if self.problems else "pass"

    def require(self, holds: bool, problem: str) -> None:
        """Notes a problem where something does not hold."""
        if not holds:
            self.problems.append(problem)

    def require_close(
        self, found: Sequence[float], expected: Sequence[float], tolerance: float, of: str
    ) -> None:
        """Notes a problem unless all numbers are finite and within an absolute tolerance.

        Args:
            found: Numbers.
            expected: What they must be.
            tolerance: How far each may be from that.
            of: Whose numbers `expected` are.
        """
        largest = largest_difference(found, expected)
        self.figures[f"largest difference from {of}"] = f"{largest:.1e}"
        self.require(
            largest <= tolerance,
            f"numbers must be within {tolerance:g} of those of {of}, not {largest:.3g}",
        )

    def require_moved(self, before: Sequence[float], after: Sequence[float], least: float) -> None:
        """Notes a problem unless training has moved a weight: else equal weights show nothing."""
        moved = largest_difference(before, after)
        self.figures["moved by"] = f"{moved:.2f}"
        self.require(moved > least, f"weights must move, not by {moved:.3g} only")


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest difference of two lists' numbers; infinity if they cannot be compared."""
    if len(found) != len(expected) or not all(map(math.isfinite, (*found, *expected))):
        return math.inf
    return max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=math.inf)
