"""Export of models with partitioned variables: each server writes its rows of the SavedModel."""

import contextvars
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.export.saved_model_export_archive import SavedModelExportArchive

from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.parameter_server.partition import is_partitioned
from tfdml.strategies.parameter_server.server_tables import check_servers_see

_is_exporting = contextvars.ContextVar("is_exporting", default=False)


def _write_out(original: Callable) -> Callable:
    def write_out(self, filepath, *args, **kwargs):
        parted = [v for v in self._tf_trackable.variables if is_partitioned(v)]
        if parted and "://" not in str(filepath):
            check_servers_see(os.path.dirname(os.path.abspath(filepath)), parted)
        token = _is_exporting.set(True)
        try:
            return original(self, filepath, *args, **kwargs)
        finally:
            _is_exporting.reset(token)

    return write_out


def _serialize_to_tensors(original: Callable) -> Callable:
    def serialize(self):
        if not is_partitioned(self):
            return original(self)
        if not _is_exporting.get():
            raise ValueError(
                f"`tf.train.Checkpoint` and `tf.saved_model.save` need whole variables. Received: "
                f"{self.path}, whose parts are on servers. Use "
                f"`tfdml.callbacks.FaultTolerantCheckpoint`, `model.save` or `model.export`."
            )
        return {"VARIABLE_VALUE": _rows_by_place(self)}

    return serialize


def _rows_by_place(variable: keras.Variable) -> dict[str, Any]:
    """Returns the parts of a variable, each on its server, by their places in the whole.

    A place is described as TensorFlow's files do: the shape of the whole, and for each axis the
    begin and the length.
    """
    whole = " ".join(str(size) for size in variable.shape)
    found, first = {}, 0
    for part in variable._value.variables:
        extents = [f"{first},{part.shape[0]}", *(f"0,{size}" for size in part.shape[1:])]
        with tf.device(part.device):
            found[f"{whole} {':'.join(extents)}"] = part.read_value()
        first += part.shape[0]
    return found


REPLACEMENTS: list[Replacement] = [
    (SavedModelExportArchive, "write_out", _write_out),
    (Variable, "_serialize_to_tensors", _serialize_to_tensors),
]
