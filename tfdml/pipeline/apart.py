"""Calls of functions apart from what the caller is in."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function eagerly, in no strategy's scope, trace, tape or device; returns its result.

    TensorFlow and Keras keep all of these by thread, so it runs in a thread of its own.

    Args:
        function: The function.
        arguments: Its arguments.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()
