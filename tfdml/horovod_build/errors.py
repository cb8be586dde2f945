"""Exception of this package: what is wrong with a build, and how to fix it."""

from pathlib import Path


class BuildError(RuntimeError):
    """Raised when Horovod cannot be built as requested.

    The message has the form "what and rule. Received: value. Fix."

    Attributes:
        log: Path of the build log; None if no build had begun.
    """

    def __init__(self, rule: str, *, received: str, fix: str, log: Path | None = None) -> None:
        """Composes the message.

        Args:
            rule: Requirement that is violated, as a sentence.
            received: Finding that violates it.
            fix: Remedy for the user, as one or more sentences.
            log: Path of the build log with the details.
        """
        message = f"{rule} Received: {received}. {fix}"
        if log is not None:
            message += f" The build log is {log}"
        super().__init__(message)
        self.log = log
