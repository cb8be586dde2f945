"""The one error of this package: what is wrong with a build, and what to do about it."""

from pathlib import Path


class BuildError(RuntimeError):
    """Horovod cannot be built, or not as asked.

    The message has the form "what and rule. Received: value. Fix."

    Attributes:
        log: The build log, when a build had already begun; else None.
    """

    def __init__(self, rule: str, *, received: str, fix: str, log: Path | None = None) -> None:
        """Composes the message.

        Args:
            rule: What must hold, as a sentence.
            received: What was found instead.
            fix: What the user can do, as one or more sentences.
            log: The log that says more.
        """
        message = f"{rule} Received: {received}. {fix}"
        if log is not None:
            message += f" The build log is {log}"
        super().__init__(message)
        self.log = log
