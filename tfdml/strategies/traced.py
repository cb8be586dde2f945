"""Tracing state of a replica's or a worker's step, passed by a context variable.

Keras and the user's own step stand between the code that sets this state and the code that reads
it, and do not pass it on. Within a step, nothing else is passed by context. Each replica traces in
its own thread.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Traced:
    """State of the caller's tracing.

    Attributes:
        scope: Scope of a worker's step, see `parameter_server.step_scope`; None on a replica.
        results: Results that metrics have returned in the step, see `replica_step`; None outside
            of a step.
        held_back: Updates from the part that XLA compiles, to be made after it; None if updates
            are not held back.
        compiled_whole: Whether XLA compiles the whole step, including the update.
        takes_gradient: Whether a gradient is being computed; others may be computed inside, as by
            a block of `remat`.
        block: Pass of a block of `remat`, see `keras_seam.step.block_passes`; None outside.
        share: Share of the microbatch that a pipeline works on; None outside of a pipeline.
        stages: The stages of its model, see `keras_seam.pipeline.stages`; None outside.
        observed: Observation of a single replica's update, see `keras_seam.step.observed`; None
            if nobody observes it.
    """

    scope: Any = None
    results: list | None = None
    held_back: list | None = None
    compiled_whole: bool = False
    takes_gradient: bool = False
    block: Any = None
    share: Any = None
    stages: Any = None
    observed: Any = None


_NOTHING = Traced()
_traced: contextvars.ContextVar[Traced] = contextvars.ContextVar("_traced", default=_NOTHING)


def traced() -> Traced:
    """Returns the state of the caller's tracing."""
    return _traced.get()


@contextlib.contextmanager
def tracing(**attributes: Any) -> Iterator[None]:
    """Context manager: sets attributes of the tracing state.

    Args:
        **attributes: New values of attributes of `Traced`.
    """
    token = _traced.set(dataclasses.replace(_traced.get(), **attributes))
    try:
        yield
    finally:
        _traced.reset(token)
