"""`run`: calls a training function again when processes were lost or gained."""

import functools
import random
from collections.abc import Callable
from typing import Any

from tfdml import topology
from tfdml.elastic.lost_ranks import translated
from tfdml.elastic.state import KerasState


def run(function: Callable) -> Callable:
    """Makes a training function elastic; the counterpart of Horovod's `hvd.elastic.run`.

    When a rank is lost, the others roll back to the last commit, in memory, and call the function
    again. When ranks are gained, all continue from the commit just made. `fit` in the function then
    resumes within its epoch, with the same global batches. Without elastic Horovod (`horovodrun`
    with `--min-np`), the function is simply called.

    Args:
        function: Training function, called as `function(state, ...)`, possibly several times.

    Returns:
        The function to call, whose first argument is a `KerasState`.
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
            # Horovod draws its services' ports from Python's random generator, so restore that.
            random.setstate(drawn)
            return function(*args, **kwargs)

        hvd.init()
        return run_fn(translated(as_drawn), _join_present_ranks)(state, *args, **kwargs)

    return elastic


def _join_present_ranks() -> None:
    """Leaves the ring of the former ranks and joins that of the present ones."""
    import horovod.tensorflow as hvd

    hvd.shutdown()
    hvd.init()
