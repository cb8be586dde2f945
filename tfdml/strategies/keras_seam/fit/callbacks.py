"""Callbacks on several processes: all start with the same state, one writes, all stop together."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.runtime.guard.guard import Guard
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.keras_seam.fit.loggers import is_logger, warn_of_active_loggers
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.weight_sync import (
    agree_on_number,
    check_loaded_together,
    check_values,
    start_from_rank_0,
)
from tfdml.timeline.rank_timeline import Kind


class CommonStart(keras.callbacks.Callback):
    """Callback that starts all processes from rank 0's weights, optimizer state and first epoch.

    It comes last, after a callback of rank 0 may have restored a checkpoint.

    Args:
        extended: The extension of the model's strategy.
    """

    def __init__(self, extended: ReplicaExtended):
        super().__init__()
        self._collective = extended.collective

    def on_train_begin(self, logs=None):
        """Broadcasts weights, optimizer state and the initial epoch.

        With local updates, each rank keeps the slots of an earlier `fit`, or of a checkpoint.
        """
        optimizer, rounds = self.model.optimizer, get_session(self.model).rounds
        if rounds is not None and rounds.have_begun:
            optimizer = None
        slots = optimizer.variables if optimizer is not None else []
        self._start([*self.model.variables, *slots])
        epoch = agree_on_number(self.model._initial_epoch, self._collective)
        self.model._initial_epoch = epoch

    def on_test_begin(self, logs=None):
        """Broadcasts the weights for a call of `evaluate`."""
        self._start(self.model.variables)

    def on_predict_begin(self, logs=None):
        """Broadcasts the weights for a call of `predict`."""
        self._start(self.model.variables)

    def _start(self, variables: Sequence[keras.Variable]) -> None:
        check_loaded_together(variables, self._collective)
        start_from_rank_0(variables, self._collective)


class Watch(keras.callbacks.Callback):
    """Callback that reports the current epoch to the guard.

    Args:
        guard: The guard.
    """

    def __init__(self, guard: Guard):
        super().__init__()
        self._guard = guard

    def on_epoch_begin(self, epoch, logs=None):
        """Reports the epoch."""
        self._guard.activity.epoch = epoch
        self._guard.activity.step = 0


class NotedCallbacks(list):
    """List of callbacks that records which callback the main thread is running.

    Args:
        callbacks: The callbacks.
        guard: The guard, which knows this process's current activity and has its recorder.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], guard: Guard):
        super().__init__(callbacks)
        self._activity, self._recorder = guard.activity, guard.recorder

    def __iter__(self) -> Iterator[keras.callbacks.Callback]:
        """Yields the callbacks to the `CallbackList` method that calls the same method of each."""
        if threading.current_thread() is not threading.main_thread():
            yield from super().__iter__()
            return
        method = sys._getframe(1).f_code.co_name.lstrip("_")
        outer = self._activity.callback
        try:
            for callback in super().__iter__():
                self._activity.callback = callback, method
                with self._recorder.span(Kind.CALLBACK, type(callback).__name__, method):
                    yield callback
        finally:
            self._activity.callback = outer


class DesyncCheck(keras.callbacks.Callback):
    """Callback that compares all weights between processes, every `check_desync` steps of an epoch.

    Args:
        extended: The extension of the model's strategy.
    """

    def __init__(self, extended: ReplicaExtended):
        super().__init__()
        self._extended = extended
        self._next = 0

    def on_epoch_begin(self, epoch, logs=None):
        """Restarts the count of steps."""
        self._next = self._extended.options.check_desync

    def on_train_batch_end(self, batch, logs=None):
        """Compares the weights if a comparison is due."""
        rounds = get_session(self.model).rounds
        is_common = rounds is None or rounds.has_common_weights
        if batch + 1 >= self._next and is_common:
            self._next = batch + 1 + self._extended.options.check_desync
            check_values(self.model.variables, self._extended.collective)


class AgreedStop(keras.callbacks.Callback):
    """Callback that ends training after an epoch on all processes if any of them asked for it.

    Args:
        collective: Collective by which the processes agree.
    """

    def __init__(self, collective: Collective):
        super().__init__()
        self._collective = collective

    def on_epoch_end(self, epoch, logs=None):
        """Agrees with the other processes whether to stop."""
        own_vote = tf.constant([int(self.model.stop_training)], tf.int32)
        votes = self._collective.all_gather(own_vote, "stop_training").numpy()
        self.model.stop_training = bool(votes.any())


class AgreedStopOfRounds(AgreedStop):
    """Callback that ends training with local updates after a synchronization, or after an epoch.

    Between synchronizations the logs, by which other callbacks stop training, are each rank's own:
    a rank's wish waits for the next synchronization, which tells the others.
    """

    def on_train_begin(self, logs=None):
        """Forgets the wishes of an earlier `fit`."""
        rounds = get_session(self.model).rounds
        if rounds is not None:
            rounds.stop_vote.reset()

    def on_train_batch_end(self, batch, logs=None):
        """Takes back a wish of this rank, and stops if any rank had one at a synchronization."""
        rounds = get_session(self.model).rounds
        if rounds is None or rounds.is_warming_up:
            return
        if self.model.stop_training:
            rounds.stop_vote.request()
        self.model.stop_training = rounds.synchronized and rounds.stop_vote.decided

    def on_epoch_end(self, epoch, logs=None):
        """Agrees with the other processes whether to stop, by this rank's earlier wish, too."""
        rounds = get_session(self.model).rounds
        if rounds is not None and rounds.stop_vote.requested:
            self.model.stop_training = True
        super().on_epoch_end(epoch, logs)


def for_this_process(
    callbacks: Sequence[keras.callbacks.Callback] | None, extended: ReplicaExtended, trains: bool
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that this process runs.

    Only rank 0 writes: on the other ranks, loggers are left out, and `ModelCheckpoint` and
    `BackupAndRestore` save nothing.

    Args:
        callbacks: The user's callbacks.
        extended: The extension of the model's strategy.
        trains: Whether the call is `fit`.
    """
    collective = extended.collective
    user_callbacks = keras.tree.flatten(callbacks) if callbacks else []
    if not collective.topology.is_chief:
        warn_of_active_loggers(collective.topology.rank)
        user_callbacks = [c for c in user_callbacks if not is_logger(c)]
        for callback in user_callbacks:
            if isinstance(
                callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore
            ):
                callback._save_model = _save_of_other_ranks(callback, extended)
                callback.delete_checkpoint = False
    if not trains:
        return [*user_callbacks, CommonStart(extended)]
    stop = AgreedStop if extended.local_updates is None else AgreedStopOfRounds
    own_callbacks = [CommonStart(extended), stop(collective)]
    # Keras waits for every batch if a callback needs its result; by default none of ours does.
    if extended.options.check_desync:
        own_callbacks.insert(0, DesyncCheck(extended))
    return [*([Watch(extended.guard)] if extended.guard else []), *user_callbacks, *own_callbacks]


def _save_of_other_ranks(
    callback: keras.callbacks.Callback, extended: ReplicaExtended
) -> Callable[..., None]:
    """Returns what ranks other than 0 do where a callback saves the model.

    They save nothing. If slots or tables are divided, they send their parts to rank 0.
    """
    if extended.options.sharding is None:
        return lambda *args, **kwargs: None
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        # It decides by the logs whether it saves, as on rank 0.
        return callback._save_model
    return lambda *args, **kwargs: callback.model.save_weights("taking_part.weights.h5")
