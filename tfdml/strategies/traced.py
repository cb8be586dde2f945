"""What the caller is in the middle of, where a replica's or a worker's step is traced.

Keras and a user's own step stand between the one who knows it and the one who asks, and hand none
of it on. So it goes by context; this is all that does, in a step. Each replica traces in a thread
of its own.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Traced:
    """What the caller is in the middle of.

    Attributes:
        scope: The scope of a worker's step, see `parameter_server.step_scope`; None on a replica.
        results: What metrics have returned in the step, see `replica_step`; None outside of one.
        held_back: The updates of the part that XLA compiles, which are made behind it; None where
            none is held back.
        compiled_whole: Whether XLA compiles the whole step, its update included.
        takes_gradient: Whether a gradient is being computed: others may be on the way, as by
            `tf.recompute_grad`.
    """

    scope: Any = None
    results: list | None = None
    held_back: list | None = None
    compiled_whole: bool = False
    takes_gradient: bool = False


_NOTHING = Traced()
_traced: contextvars.ContextVar[Traced] = contextvars.ContextVar("_traced", default=_NOTHING)


def traced() -> Traced:
    """Returns what the caller is in the middle of."""
    return _traced.get()


@contextlib.contextmanager
def tracing(**attributes: Any) -> Iterator[None]:
    """While this is entered, the caller is in the middle of that, too.

    Args:
        **attributes: Attributes of `Traced`.
    """
    token = _traced.set(dataclasses.replace(_traced.get(), **attributes))
    try:
        yield
    finally:
        _traced.reset(token)
