"""Hooks of replicas whose first train steps are recorded, eagerly, for `tfdml verify`.

The recorder sees a step where tfdml's strategies see it: the rows of a replica, the outputs of
layers and losses, gradients before and after their exchange. Steps run eagerly, so that each tensor
is there to be noted. Nothing else differs from training, but for what would make runs differ
without being wrong: see `repeatable`.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfdml.strategies.arguments import ReplicaOptions
from tfdml.strategies.input.input_checks import draws_without_seed
from tfdml.strategies.input.local_batch import as_tensors
from tfdml.strategies.keras_seam.calls import Call
from tfdml.strategies.keras_seam.current import (
    current_extended,
    current_share,
    get_extended,
    is_updating,
)
from tfdml.strategies.keras_seam.fit.loggers import is_logger
from tfdml.strategies.keras_seam.fit.resuming import ResumingCallback
from tfdml.strategies.keras_seam.fit.trainer import ReplicaHooks
from tfdml.strategies.keras_seam.recording import noting, repeatable
from tfdml.strategies.keras_seam.recording.recorder import Recorder
from tfdml.strategies.keras_seam.replacing import put_in_place
from tfdml.strategies.keras_seam.step.optimizers import distinct_names, inner_of
from tfdml.verification import record
from tfdml.verification.request import Request, requested

# Callbacks that write, or read what another run has written.
_WRITERS = (
    ResumingCallback,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
)
_NEVER = 1 << 30


class RecordingHooks(ReplicaHooks):
    """Hooks of replicas that record the first train steps, and then end the process.

    Args:
        request: The request.
    """

    def __init__(self, request: Request):
        self._recorder = Recorder(request)
        if request.float64:
            keras.config.set_floatx("float64")
        put_in_place(
            [*noting.replacements(self._recorder), *repeatable.replacements(self._recorder)]
        )

    def strategy_options(self, options: ReplicaOptions) -> ReplicaOptions:
        """Returns the options without those that are not the same training, and notes them."""
        left_out, facts = repeatable.left_out(options, self._recorder.request.compresses)
        self._recorder.facts["left_out"] += facts
        return left_out

    @contextlib.contextmanager
    def calling(self, call: Call, arguments: dict[str, Any]) -> Iterator[None]:
        """Leaves out what does not belong to the first steps of a `fit`; see `ReplicaHooks`."""
        if call.name != "fit":
            with super().calling(call, arguments):
                yield
            return
        call.model.steps_per_execution = 1
        given = keras.tree.flatten(arguments.get("callbacks") or [])
        writers = [c for c in given if isinstance(c, _WRITERS) or is_logger(c)]
        self._recorder.facts["left_out"] += [type(c).__name__ for c in writers]
        arguments["callbacks"] = [c for c in given if c not in writers]
        arguments.update(verbose=0, validation_freq=_NEVER)
        with super().calling(call, arguments):
            yield
        # The data had fewer steps than were asked for.
        self._recorder.finish(get_extended(call.model._distribute_strategy).collective.rank)

    def set_up_data(
        self,
        keras_init: Callable,
        call: Call,
        iterator: TFEpochIterator,
        strategy: tf.distribute.Strategy,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Sets up the data, and notes what is random in them; see `ReplicaHooks`."""

        def init(*args: Any, **kwargs: Any) -> None:
            # The order of arrays is rank 0's on all ranks: it may be the same in all runs, too.
            state = random.getstate()
            random.seed(0)
            try:
                keras_init(*args, **kwargs)
            finally:
                random.setstate(state)
            self._note_data(iterator)

        init = init if call.trains else keras_init
        super().set_up_data(init, call, iterator, strategy, *args, **kwargs)

    def _note_data(self, iterator: TFEpochIterator) -> None:
        dataset = iterator._distributed_dataset
        adapter = type(iterator.data_adapter).__name__
        is_pipeline = isinstance(dataset, tf.data.Dataset) and adapter == "TFDatasetAdapter"
        self._recorder.facts["data"] = {
            "adapter": adapter,
            "drawn": draws_without_seed(dataset) if is_pipeline else None,
        }

    def make_function(self, keras_make, model, step) -> Callable:
        """Returns a function whose train steps are recorded; see `ReplicaHooks`."""
        if step.__name__ != "train_step":
            return super().make_function(keras_make, model, step)
        recorder, extended = self._recorder, get_extended(model._distribute_strategy)
        model.run_eagerly, model.jit_compile = True, False
        recorder.facts.update(
            {
                "strategy": type(model.distribute_strategy).__name__,
                "replicas": extended._num_replicas_in_sync,
                "ranks": extended.collective.size,
                "precision": _precision(model),
            }
        )
        recorder.facts["left_out"] += repeatable.left_out_of_model(model)
        noting.note_losses_of(model, recorder)
        function = super().make_function(keras_make, model, self._noted(step))
        rank = extended.collective.rank

        def on_batches(iterator):
            if not recorder.has_begun:
                repeatable.start_alike(model, recorder.request, rank)
                recorder.begin(model, rank)
            with recorder.in_step():
                logs = function(iterator)
            recorder.end(model, logs, rank)
            return logs

        return on_batches

    def _noted(self, step: Callable) -> Callable:
        recorder = self._recorder

        @functools.wraps(step)
        def train_step(data: Any) -> Any:
            replica = tf.distribute.get_replica_context()
            number = current_extended().number_of_replica(replica._local_replica_id)
            data = as_tensors(data)
            with recorder.on_replica(number, current_share(), data), noting.noting_draws(recorder):
                return step(repeatable.with_rounding(data, recorder))

        return train_step

    def next_seed(self, keras_next, generator, ordered) -> tf.Tensor:
        """Returns the same seed on all replicas: each row has random numbers of its own."""
        return keras_next(generator, ordered)

    def apply(self, keras_apply, optimizer, gradients: Sequence, variables: list | None) -> None:
        """Notes gradients before and after their exchange, and the learning rate."""
        if is_updating() or current_extended() is None:
            super().apply(keras_apply, optimizer, gradients, variables)
            return
        recorder, inner = self._recorder, inner_of(optimizer)
        given = inner._trainable_variables if variables is None else variables
        names = distinct_names(inner, given)
        recorder.note_gradients(record.GRADIENT, names, gradients)

        def with_sums(optimizer, sums, variables=None):
            recorder.note_gradients(record.SUM, names, sums)
            recorder.note_rate(inner.name, tf.convert_to_tensor(inner.learning_rate))
            keras_apply(optimizer, sums, variables)

        super().apply(with_sums, optimizer, gradients, variables)


def _precision(model: keras.Model) -> str:
    """Returns the dtype that rounds most among those that a model's layers compute in."""
    used = {layer.compute_dtype for layer in model._flatten_layers()}
    return next((d for d in ("bfloat16", "float16", "float32") if d in used), "float64")


def replica_hooks() -> ReplicaHooks:
    """Returns the hooks of this process's replicas: those that record if a request asks for it."""
    request = requested()
    return ReplicaHooks() if request is None else _recording_hooks(request)


@functools.cache
def _recording_hooks(request: Request) -> RecordingHooks:
    """Returns the process's only recording hooks, for all strategies that its script makes."""
    return RecordingHooks(request)
