"""Shapes and dtypes of a training batch, from the model or from a batch of data."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def batch_specs(model: keras.Model, rows: int, data: Any = None) -> Iterator[Any]:
    """Yields what `train_step` may get, the likeliest first: structures of `tf.TensorSpec`.

    Without data, inputs are the model's; targets have its outputs' shapes, or for sparse losses
    one number in place of the classes.

    Args:
        model: A built model.
        rows: Rows of the batch.
        data: A batch `(x, y)` or `(x, y, sample_weight)` of tensors, arrays or specs; or None.

    Raises:
        ValueError: If the model's inputs are not known.
    """
    if data is not None:
        yield tf.nest.map_structure(lambda t: t if t is None else _spec_of(t, rows), data)
        return
    inputs = _inputs(model, rows)
    try:
        outputs = _outputs(model, inputs)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`data` must be a batch where the model does not say what it reads. Received: "
            f"data=None and {type(model).__name__}, which fails on {inputs}: {error} Pass "
            f"`data=(x, y)`."
        ) from error
    same = tf.nest.map_structure(lambda t: _spec(t.shape, "float32", rows), outputs)
    sparse = tf.nest.map_structure(lambda t: _spec(t.shape[:-1], "int32", rows), outputs)
    likely = [sparse, same] if "sparse" in _names_of_losses(model) else [same, sparse]
    for targets in likely:
        yield inputs, targets


def _spec(shape: Any, dtype: Any, rows: int) -> tf.TensorSpec:
    shape = tuple(shape)
    return tf.TensorSpec((rows, *shape[1:]) if shape else (), dtype)


def _spec_of(given: Any, rows: int) -> tf.TensorSpec:
    # Keras converts arrays of float64.
    is_double = isinstance(given, np.ndarray) and given.dtype == np.float64
    return _spec(given.shape, keras.config.floatx() if is_double else given.dtype, rows)


def _inputs(model: keras.Model, rows: int) -> Any:
    given = getattr(model, "_inputs_struct", None)
    if given is None and isinstance(model, keras.Sequential):
        given = model.inputs[0]
    if given is not None:
        return tf.nest.map_structure(lambda t: _spec(t.shape, t.dtype, rows), given)
    config = model.get_build_config() or {}
    shape = config.get("input_shape", config.get("shapes_dict"))
    if shape is None:
        raise ValueError(
            f"`data` must be a batch where the model does not say what it reads. Received: "
            f"data=None and {type(model).__name__}. Pass `data=(x, y)`."
        )
    return _specs_of_shapes(shape, model.input_dtype, rows)


def _specs_of_shapes(shape: Any, dtype: str, rows: int) -> Any:
    if isinstance(shape, dict):
        found = [_specs_of_shapes(s, dtype, rows) for s in shape.values()]
        return found[0] if len(found) == 1 else found
    if any(isinstance(part, list | tuple) for part in shape):
        return [_specs_of_shapes(part, dtype, rows) for part in shape]
    return _spec(shape, dtype, rows)


def _outputs(model: keras.Model, inputs: Any) -> Any:
    known = getattr(model, "_outputs_struct", None)
    if known is not None:
        return known
    symbolic = tf.nest.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), inputs)
    return model.compute_output_spec(symbolic)


def _names_of_losses(model: keras.Model) -> str:
    losses = tf.nest.flatten(getattr(model, "loss", None))
    names = [loss if isinstance(loss, str) else getattr(loss, "name", "") for loss in losses]
    return " ".join(map(str, names)).lower()
