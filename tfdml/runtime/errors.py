"""Exceptions of a rank for failures caused by its data or by another rank."""


class OtherRankError(RuntimeError):
    """Raised when another rank has failed, so this one cannot continue; that rank says why."""


class DataError(RuntimeError):
    """Raised when this rank's data pipeline fails.

    TensorFlow's own error may be of a type that a lost rank causes too.
    """
