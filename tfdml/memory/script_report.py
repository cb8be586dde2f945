"""A report of a training script, which runs until its first `fit`."""

import contextlib
import inspect
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.memory.estimate import estimate_memory
from tfdml.memory.report import MemoryReport

# Keras's own default.
_BATCH_SIZE = 32


class _Reached(BaseException):
    """Ends the script at its first `fit`. No `except Exception` of the script catches it."""

    def __init__(self, model: keras.Model, arguments: dict[str, Any]):
        super().__init__()
        self.model, self.arguments = model, arguments


def report_of(
    script: str, arguments: Sequence[str], ranks: Sequence[int] | None = None
) -> MemoryReport:
    """Runs a script until its first `fit`, and estimates the memory of that.

    Args:
        script: The script's file.
        arguments: Its arguments.
        ranks: Numbers of ranks in the table; see `estimate_memory`.

    Raises:
        ValueError: If the script ends without a `fit`, or the estimate cannot be made.
    """
    reached = _run(script, arguments)
    data, batch_size = _batch(reached.arguments)
    model = reached.model
    if not model.built:
        _build(model, data[0])
    return estimate_memory(model, batch_size, data=data, ranks=ranks)


def write_json(report: MemoryReport, file: Path) -> None:
    """Writes a report as JSON."""
    file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")


def _run(script: str, arguments: Sequence[str]) -> _Reached:
    """Runs a script as `python SCRIPT` does, until its first `fit`."""
    with _as_program(script, arguments), _no_fit():
        try:
            runpy.run_path(script, run_name="__main__")
        except _Reached as reached:
            return reached
        except SystemExit as ended:
            raise ValueError(
                f"SCRIPT must call `fit`. Received: {script}, which ended before, with exit code "
                f"{ended.code}."
            ) from ended
    raise ValueError(
        f"SCRIPT must call `fit`. Received: {script}, which ended without. For loops of your own "
        f"call `tfdml.estimate_memory` in the script."
    )


@contextlib.contextmanager
def _as_program(script: str, arguments: Sequence[str]) -> Iterator[None]:
    before = list(sys.argv), list(sys.path)
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = before


@contextlib.contextmanager
def _no_fit() -> Iterator[None]:
    """Context manager: `fit` of any model ends the script."""
    signature = inspect.signature(keras.Model.fit)

    def fit(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        raise _Reached(self, dict(signature.bind(self, *args, **kwargs).arguments))

    keras.Model.fit = fit
    try:
        yield
    finally:
        del keras.Model.fit


def _batch(arguments: dict[str, Any]) -> tuple[tuple, int]:
    """Returns a batch's specs, `(x, y)` or `(x, y, sample_weight)`, and its rows."""
    x = arguments.get("x")
    given = [arguments.get(name) for name in ("y", "sample_weight")]
    if _is_arrays(x):
        while given and given[-1] is None:
            given.pop()
        specs = tf.nest.map_structure(_spec_of_array, (x, *given))
        return specs, arguments.get("batch_size") or _BATCH_SIZE
    specs = getattr(x, "element_spec", None)
    if specs is None or _rows(specs) is None:
        first = x[0] if isinstance(x, keras.utils.PyDataset) else next(iter(x))
        specs = tf.nest.map_structure(_spec_of_array, first)
    specs = tuple(specs) if isinstance(specs, tuple | list) else (specs,)
    return specs, _rows(specs)


def _is_arrays(x: Any) -> bool:
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset) or hasattr(x, "element_spec"):
        return False
    return all(hasattr(part, "shape") for part in tf.nest.flatten(x))


def _spec_of_array(array: Any) -> tf.TensorSpec:
    if not hasattr(array, "shape"):
        raise ValueError(
            f"`fit` must get arrays, a dataset or batches of arrays. Received: {array!r} among its "
            f"data. Call `tfdml.estimate_memory` in the script, with `data=`."
        )
    dtype = getattr(array, "dtype", None)
    dtype = np.asarray(array).dtype if dtype is None else dtype
    dtype = tf.as_dtype(dtype)
    # Keras converts arrays of float64.
    return tf.TensorSpec(array.shape, keras.config.floatx() if dtype == tf.float64 else dtype)


def _rows(specs: Any) -> int | None:
    shape = tf.nest.flatten(specs)[0].shape
    return shape[0] if shape.rank else None


def _build(model: keras.Model, x: Any) -> None:
    """Builds a model that has no weights yet by calling it on one row."""
    row = tf.nest.map_structure(lambda s: tf.zeros((1, *s.shape[1:]), s.dtype), x)
    with model.distribute_strategy.scope():
        model(row)
