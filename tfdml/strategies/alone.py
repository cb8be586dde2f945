"""Training outside of a strategy's scope in a process that belongs to a job of several."""

import contextlib
import contextvars
import gc
import itertools
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdml import topology

# The strategies of this process, numbered as they are made. How many processes one has may change:
# they come and go.
_strategies: weakref.WeakValueDictionary[int, tf.distribute.Strategy]
_strategies = weakref.WeakValueDictionary()
_numbers = itertools.count()
_is_meant: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_meant", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets this process train a model by itself, in a job of several processes.

    A model that was made outside of the strategy's scope trains on one process only: each has its
    own weights, and sees all data. Without this, `fit` refuses that, because as a rule the scope
    was forgotten. In the same way a strategy of one process is refused in a process that was
    started as one of several.
    """
    token = _is_meant.set(True)
    try:
        yield
    finally:
        _is_meant.reset(token)


def note_strategy(strategy: tf.distribute.Strategy) -> None:
    """Notes a strategy, by which this process may belong to a job of several."""
    _strategies[next(_numbers)] = strategy


def check_started_alone(strategy: str) -> None:
    """Refuses a strategy of one process where a launcher has started several, if it is not meant.

    Each would train a model of its own on all data, and nothing would tell: this happens under a
    launcher of another strategy.

    Args:
        strategy: The strategy's name.

    Raises:
        ValueError: If this process is one of several, and `alone` is not entered.
    """
    place = topology.started_together()
    if _is_meant.get() or place.size == 1 or topology.is_elastic():
        return
    if place.launcher == "TF_CONFIG":
        fix = (
            "Use `tfdml.MultiWorkerMirroredStrategy` here; `tfdml launch --horovod` starts Horovod."
        )
    else:
        fix = "Use `tfdml.HorovodStrategy` here; `tfdml launch` starts workers without Horovod."
    raise ValueError(
        f"`{strategy}` must be made in a process that was started for it, or each process trains a "
        f"model of its own. Received: a job of one process, in rank {place.rank} of {place.size} "
        f"as {place.launcher} says. {fix} If each process is to train by itself, make the strategy "
        f"under `with tfdml.alone():`."
    )


def check_not_alone(model: keras.Model) -> None:
    """Refuses to train a model outside of the scope, where it is not meant.

    Args:
        model: A model that belongs to none of our strategies.

    Raises:
        ValueError: If this process belongs to a job of several, and `alone` is not entered.
    """
    if _is_meant.get() or not _jobs():
        return
    gc.collect()  # A strategy that nobody holds any more may still be there, in cycles.
    for strategy in _jobs():
        raise model_made_outside(model, getattr(strategy, "rank", 0))


def strategy_made_last() -> tf.distribute.Strategy | None:
    """Returns the strategy that a model without one should train under.

    None if it has but one replica, or `alone` is entered.
    """
    if _is_meant.get() or not _strategies:
        return None
    last = _strategies[max(_strategies)]
    return last if last.size > 1 or last.num_replicas_in_sync > 1 else None


def _jobs() -> list[tf.distribute.Strategy]:
    return [strategy for strategy in _strategies.values() if strategy.size > 1]


def model_made_outside(model: keras.Model, rank: int) -> ValueError:
    """Returns the error for a model that trains without the strategy it should have."""
    return ValueError(
        f"The model must be made in the strategy's scope, or each process trains alone. Received "
        f"on rank {rank}: {model.name!r}, made outside. Build (or load, or clone) and compile it "
        f"under `with strategy.scope():`. If each process is to train by itself, call `fit` under "
        f"`with tfdml.alone():`."
    )
