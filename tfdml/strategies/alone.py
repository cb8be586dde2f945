"""Training outside a strategy's scope in one process of a job of several processes."""

import contextlib
import contextvars
import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdml import topology

# The strategies of this process, numbered in the order of creation. The number of processes of a
# strategy may change, because an elastic job gains and loses processes.
_strategies: weakref.WeakValueDictionary[int, tf.distribute.Strategy]
_strategies = weakref.WeakValueDictionary()
_numbers = itertools.count()
_is_meant: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_meant", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context manager: this process may train a model by itself, in a job of several processes.

    A model made outside the strategy's scope trains on one process only: each process has its own
    weights and sees all data. Outside this context `fit` refuses such a model, because usually the
    scope was forgotten. For the same reason a single-process strategy is refused in a process that
    a launcher started as one of several.
    """
    token = _is_meant.set(True)
    try:
        yield
    finally:
        _is_meant.reset(token)


def note_strategy(strategy: tf.distribute.Strategy) -> None:
    """Registers a strategy; through it this process may belong to a job of several processes."""
    _strategies[next(_numbers)] = strategy


def check_started_alone(strategy: str) -> None:
    """Refuses a single-process strategy where a launcher has started several processes.

    Each process would silently train its own model on all data. This happens under the launcher of
    another strategy.

    Args:
        strategy: The strategy's name, for the error message.

    Raises:
        ValueError: If this process is one of several and is not inside `alone`.
    """
    job = topology.started_together()
    if topology.is_chief_of_servers() and not _is_meant.get():
        warnings.warn(
            f"`{strategy}` trains in this process alone: the workers and parameter servers of "
            f"TF_CONFIG wait for nothing. Use `tfdml.ParameterServerStrategy` here.",
            stacklevel=2,
        )
    if _is_meant.get() or job.size == 1 or topology.is_elastic():
        return
    if job.launcher == "TF_CONFIG":
        fix = (
            "Use `tfdml.MultiWorkerMirroredStrategy` here; `tfdml launch --horovod` starts Horovod."
        )
    else:
        fix = "Use `tfdml.HorovodStrategy` here; `tfdml launch` starts workers without Horovod."
    raise ValueError(
        f"`{strategy}` must be made in a process that was started for it, or each process "
        f"trains a separate model. Received: a job of one process, in rank {job.rank} of "
        f"{job.size} according to {job.launcher}. {fix} If each process is to train by itself, "
        f"make the strategy under `with tfdml.alone():`."
    )


def check_not_alone(model: keras.Model) -> None:
    """Refuses to train a model outside the scope, unless the caller is inside `alone`.

    Args:
        model: A model that does not belong to any of our strategies.

    Raises:
        ValueError: If this process belongs to a job of several and is not inside `alone`.
    """
    if _is_meant.get() or not _jobs():
        return
    gc.collect()  # An unreferenced strategy may still be alive in a reference cycle.
    for strategy in _jobs():
        raise model_made_outside(model, getattr(strategy, "rank", 0))


def strategy_made_last() -> tf.distribute.Strategy | None:
    """Returns the newest strategy, under which a model without a strategy should train.

    Returns None if that strategy has only one replica, or inside `alone`.
    """
    if _is_meant.get() or not _strategies:
        return None
    last = _strategies[max(_strategies)]
    return last if last.size > 1 or last.num_replicas_in_sync > 1 else None


def _jobs() -> list[tf.distribute.Strategy]:
    return [strategy for strategy in _strategies.values() if strategy.size > 1]


def model_made_outside(model: keras.Model, rank: int) -> ValueError:
    """Returns the error for a model that would train outside the strategy it should have."""
    return ValueError(
        f"The model must be made in the strategy's scope, or each process trains alone. Received "
        f"on rank {rank}: {model.name!r}, made outside. Build (or load, or clone) and compile it "
        f"under `with strategy.scope():`. If each process is to train by itself, call `fit` under "
        f"`with tfdml.alone():`."
    )
