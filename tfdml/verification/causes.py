"""The cause of a difference between one process and several: the first that is recognised."""

from tfdml.verification import record
from tfdml.verification.comparing import Comparison
from tfdml.verification.evidence import Cause, Evidence
from tfdml.verification.row_causes import ROW_CAUSES
from tfdml.verification.step_causes import STEP_CAUSES


def cause_of(comparison: Comparison) -> Cause | None:
    """Returns the cause of the first difference; None if there is none."""
    if comparison.first is None:
        return None
    found = Evidence(comparison, comparison.first)
    causes = ROW_CAUSES if found.kind == record.ROWS else STEP_CAUSES
    return next(cause for make in causes if (cause := make(found)) is not None)
