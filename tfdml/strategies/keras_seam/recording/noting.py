"""Noting of what layers and losses return, and of layers that draw random numbers."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from tensorflow.python.framework import op_callbacks

from tfdml.strategies.keras_seam.recording.recorder import Recorder
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.verification import record

_DRAWS = ("Random", "StatelessRandom", "StatelessTruncated", "TruncatedNormal", "Multinomial")


def replacements(recorder: Recorder) -> list[Replacement]:
    """Returns replacements of Keras's functions by which a recorder notes outputs and losses."""

    def call_layer(original: Callable) -> Callable:
        def __call__(self, *args, **kwargs):
            replica = recorder.replica
            if replica is None:
                return original(self, *args, **kwargs)
            replica.layers.append(self)
            try:
                outputs = original(self, *args, **kwargs)
            finally:
                replica.layers.pop()
            recorder.note_layer(self, _facts_of(self))
            recorder.note_values(record.OUTPUT, self.name, outputs)
            return outputs

        return __call__

    def call_loss(original: Callable) -> Callable:
        def __call__(self, *args, **kwargs):
            loss = original(self, *args, **kwargs)
            recorder.note_values(record.LOSS, self.name, loss)
            return loss

        return __call__

    return [
        (keras.layers.Layer, "__call__", call_layer),
        (keras.losses.Loss, "__call__", call_loss),
    ]


def note_losses_of(model: keras.Model, recorder: Recorder) -> None:
    """Makes a recorder note the total loss of a model, which may have a `compute_loss` of its own.

    Args:
        model: The model.
        recorder: The recorder.
    """
    compute_loss = model.compute_loss

    @functools.wraps(compute_loss)
    def noted(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        recorder.note_values(record.LOSS, "total", loss)
        return loss

    model.compute_loss = noted


@contextlib.contextmanager
def noting_draws(recorder: Recorder) -> Iterator[None]:
    """Context manager: the recorder notes which layers of the calling replica draw numbers."""

    def note(op_type, inputs, attrs, outputs, op_name=None, graph=None) -> None:
        replica = recorder.replica
        name = op_type.decode() if isinstance(op_type, bytes) else op_type
        if replica is not None and replica.layers and name.startswith(_DRAWS):
            recorder.note_layer(replica.layers[-1], {"draws": name})

    op_callbacks.add_op_callback(note)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(note)


def _facts_of(layer: keras.layers.Layer) -> dict[str, Any]:
    facts = {"class": type(layer).__name__}
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        facts["normalizes"] = record.WHOLE_BATCH if layer.synchronized else record.OWN_ROWS
    return facts
