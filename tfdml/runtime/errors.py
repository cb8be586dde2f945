"""What a rank raises where its data, or another rank, is to blame."""

import tensorflow as tf

# Errors that a rank may get because another one has gone: they do not say which.
BROKEN = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)


class OtherRankError(RuntimeError):
    """Another rank cannot go on, so this one cannot either; the other one says why."""


class DataError(RuntimeError):
    """This rank's data raised. TensorFlow's error for it may be one that a lost rank causes too."""
