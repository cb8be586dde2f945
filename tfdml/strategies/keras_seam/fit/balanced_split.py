"""New parts of batches for the replicas, from one epoch of a `fit` to the next."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.strategies.batch_split import BatchSplit, balanced


class BalancedSplit(keras.callbacks.Callback):
    """Callback that plans the next epoch's parts at an epoch's end, the same on all processes.

    It comes first: checkpoints that other callbacks save at an epoch's end have the new plan.

    Args:
        split: The strategy's parts.
        clock: Function that returns, for the model, the clock whose `read` has each replica's rows
            and seconds.
        collective: Collective by which rank 0 tells the others.
    """

    def __init__(
        self, split: BatchSplit, clock: Callable[[keras.Model], Any], collective: Collective
    ):
        super().__init__()
        self._split, self._make_clock, self._collective = split, clock, collective
        self._clock: Any = None

    def set_model(self, model: keras.Model) -> None:
        """Adds the clock to the model's train step."""
        super().set_model(model)
        self._clock = self._make_clock(model)

    def on_epoch_begin(self, epoch, logs=None):
        """Makes the planned parts hold."""
        self._split.begin_epoch()
        self._clock.reset()

    def on_epoch_end(self, epoch, logs=None):
        """Plans the next parts by the times of this epoch, on rank 0 for all."""
        measured = self._clock.read()
        # As many on all ranks: the clocks have the same sums.
        if measured is None:
            return
        decided = tf.constant(balanced(*measured) or self._split.weights, tf.int64)
        decided = self._collective.broadcast(decided, "batch_split").numpy()
        self._split.plan([int(weight) for weight in decided])


def with_balanced_split(callbacks: Any, own: BalancedSplit, model: keras.Model) -> Any:
    """Returns the callbacks of a model's `fit` with this one before all others."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        own.set_model(model)
        callbacks.callbacks.insert(0, own)
        return callbacks
    return [own, *(keras.tree.flatten(callbacks) if callbacks else [])]
