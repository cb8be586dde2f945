"""Errors of what ranks do together, without TensorFlow's pages around what they say."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tfdml.runtime.descriptions import is_of_python_code, without_pages

# Errors that a rank may get because another one has gone: they do not say which.
BROKEN = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
# As tfdml's own assertions say what is wrong.
_OWN_ASSERTION = re.compile(r"assertion failed: .* must .*Received ", re.S)


@contextlib.contextmanager
def in_plain_words() -> Iterator[None]:
    """While this is entered, an error of what ranks do together says what it says, and no more.

    That is one of tfdml's assertions, and an exchange that another rank's end has broken. Of any
    other one, the pages that TensorFlow tells besides may be needed.
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, *BROKEN) as error:
        broken = isinstance(error, BROKEN) and not is_of_python_code(error.message)
        if not broken and not _OWN_ASSERTION.search(error.message):
            raise
        raise type(error)(None, None, without_pages(error.message)) from None
