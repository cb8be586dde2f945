"""Finding of a check, which `tfdml doctor` prints."""

import dataclasses
import enum


class Status(enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Subject of the check.
        status: ERROR if training cannot work, WARNING if it may not.
        what: Description of what was found.
        fix: Remedy; empty if none is needed.
    """

    name: str
    status: Status
    what: str
    fix: str = ""


def ok(name: str, what: str) -> Finding:
    """Returns a finding that needs no action."""
    return Finding(name, Status.OK, what)


def warning(name: str, what: str, fix: str) -> Finding:
    """Returns a finding that may matter."""
    return Finding(name, Status.WARNING, what, fix)


def error(name: str, what: str, fix: str) -> Finding:
    """Returns a finding that must be fixed before training can work."""
    return Finding(name, Status.ERROR, what, fix)
