"""Python objects from rank 0: a function that it calls for all ranks."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective


def call_on_rank_0(collective: Collective, function: Callable[[], Any], name: str) -> Any:
    """Calls a function on rank 0, and returns its result, or raises its error, on all ranks.

    Args:
        collective: Collective that moves tensors between processes; all of them call this.
        function: Function without arguments. The other ranks get a copy of what it returns.
        name: Prefix of the exchanges' names.

    Raises:
        TypeError: If the result cannot be pickled.
        Exception: What `function` has raised; on other ranks a copy of it.
    """
    if collective.size == 1:
        return function()
    result, error, message = None, None, b""
    if collective.rank == 0:
        try:
            result = function()
            message = _pickled(result)
        except Exception as raised:  # noqa: BLE001 (it is raised below, on all ranks)
            error, message = raised, pickle.dumps((None, _portable(raised)))
    message = _broadcast_bytes(collective, message, name)
    if collective.rank != 0:
        result, error = pickle.loads(message)
    if error is not None:
        raise error
    return result


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps((result, None))
    except Exception as error:
        raise TypeError(
            f"A function that is called on rank 0 must return what can be pickled, because the "
            f"other ranks get a copy. Received: {type(result).__name__} ({error}). Return its "
            f"numbers, texts or arrays."
        ) from error


def _portable(error: Exception) -> Exception:
    """Returns the error, or one with the same text if it cannot be copied."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (an error's constructor may raise anything)
        return RuntimeError(f"Rank 0 raised {type(error).__name__}: {error}")


def _broadcast_bytes(collective: Collective, own: bytes, name: str) -> bytes:
    length = tf.constant([len(own)], tf.int64)
    length = int(collective.broadcast(length, f"{name}/length").numpy()[0])
    # As int64, which every transport carries unchanged.
    padded = own.ljust(-(-length // 8) * 8, b"\0")
    words = tf.constant(np.frombuffer(padded, np.int64))
    return collective.broadcast(words, f"{name}/bytes").numpy().tobytes()[:length]
