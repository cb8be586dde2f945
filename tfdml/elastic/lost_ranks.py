"""Recognition of the errors that a lost rank causes."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def translated(function: Callable) -> Callable:
    """Returns `function` with errors of lost ranks raised as `HorovodInternalError`.

    That is the exception after which Horovod Elastic resumes.
    """
    from horovod.common.exceptions import HorovodInternalError

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except tf.errors.OpError as error:
            if not is_of_lost_rank(error):
                raise
            raise HorovodInternalError(error.message) from error

    return call


def is_of_lost_rank(error: tf.errors.OpError) -> bool:
    """Returns whether one of Horovod's operations failed, and not the program itself."""
    kinds = (tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.InternalError)
    return isinstance(error, kinds) and "horovod" in error.message.lower()
