"""Errors of collective operations, stripped of TensorFlow's pages of graph locations."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tfdml.runtime.descriptions import is_of_python_code, without_pages

# Errors that a rank may get because another one is lost: they do not say which.
BROKEN = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
# The form of the messages of tfdml's own assertions.
_OWN_ASSERTION = re.compile(r"assertion failed: .* must .*Received ", re.S)


@contextlib.contextmanager
def in_plain_words() -> Iterator[None]:
    """Context manager: shortens errors of collective operations to their message.

    These are tfdml's own assertions, and exchanges broken by the end of another rank. Other errors
    pass unchanged: TensorFlow's details may be needed there.
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, *BROKEN) as error:
        broken = isinstance(error, BROKEN) and not is_of_python_code(error.message)
        if not broken and not _OWN_ASSERTION.search(error.message):
            raise
        raise type(error)(None, None, without_pages(error.message)) from None
