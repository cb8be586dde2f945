"""`run`: calls a training function again, with other processes, when some were lost or gained."""

import functools
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdml import topology
from tfdml.elastic.state import KerasState


def run(function: Callable) -> Callable:
    """Makes a function that trains elastic; used as Horovod's `hvd.elastic.run`.

    When a rank is lost, the others roll back to the last commit, in memory, and call the function
    again; when ranks are gained, all go on from the commit that they have come to. `fit` in the
    function then goes on within its epoch, with the same global batches. Started by another
    launcher than `horovodrun` with `--min-np`, the function is just called.

    Args:
        function: Called as `function(state, ...)`; it may have been called before.

    Returns:
        The function to call, with a `KerasState` first.
    """

    @functools.wraps(function)
    def elastic(state: KerasState, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, KerasState):
            raise TypeError(f"`state` must be a `tfdml.elastic.KerasState`. Received: {state!r}.")
        if not topology.is_elastic():
            return function(state, *args, **kwargs)
        import horovod.tensorflow as hvd
        from horovod.common.elastic import run_fn

        drawn = random.getstate()

        def as_drawn(*args: Any, **kwargs: Any) -> Any:
            # Horovod draws the ports of its own services from Python's generator.
            random.setstate(drawn)
            return function(*args, **kwargs)

        hvd.init()
        return run_fn(translated(as_drawn), _start_anew)(state, *args, **kwargs)

    return elastic


def translated(function: Callable) -> Callable:
    """Returns `function`, which raises what Horovod Elastic goes on after where a rank was lost."""
    from horovod.common.exceptions import HorovodInternalError

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except tf.errors.OpError as error:
            if not comes_of_a_lost_rank(error):
                raise
            raise HorovodInternalError(error.message) from error

    return call


def comes_of_a_lost_rank(error: tf.errors.OpError) -> bool:
    """Returns whether one of Horovod's operations has failed, and nothing of the program's."""
    kinds = (tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.InternalError)
    return isinstance(error, kinds) and "horovod" in error.message.lower()


def _start_anew() -> None:
    """Leaves the ring of the ranks of before, and enters that of those there are now."""
    import horovod.tensorflow as hvd

    hvd.shutdown()
    hvd.init()
