"""What a check found: the only thing that checks return and `doctor` prints."""

import dataclasses
import enum


class Status(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        status: ERROR where training cannot work, WARNING where it may not.
        what: What was found.
        fix: What to do; empty when there is nothing to do.
    """

    name: str
    status: Status
    what: str
    fix: str = ""


def ok(name: str, what: str) -> Finding:
    """Returns a finding that needs nothing done."""
    return Finding(name, Status.OK, what)


def warning(name: str, what: str, fix: str) -> Finding:
    """Returns a finding that may matter."""
    return Finding(name, Status.WARNING, what, fix)


def error(name: str, what: str, fix: str) -> Finding:
    """Returns a finding without whose mending training does not work."""
    return Finding(name, Status.ERROR, what, fix)
