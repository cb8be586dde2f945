"""State of the global random generators of Python, NumPy, TensorFlow and Keras.

`tf.random.normal` and similar functions draw from state inside TensorFlow's kernels, which cannot
be read: after a restart their numbers differ. Layers and `keras.random` do not use them.
"""

import random
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.strategies.keras_seam.fit.resuming import global_seed_generator
from tfdml.strategies.replicas.rank_state import assign_values, values_of
from tfdml.strategies.replicas.step_state import components


def read() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the state of this process's generators: data for JSON, and arrays by name."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    notes = {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}
    arrays = {
        "random/python": np.array(numbers, np.uint32),
        "random/numpy": keys.astype(np.uint32),
    }
    tensorflow = _tensorflows_generator()
    if tensorflow is not None:
        arrays["random/tensorflow"] = tensorflow.state.numpy()
    own = global_seed_generator(make=False)
    if own is not None:
        arrays["random/keras"] = np.array(values_of([components(own.state)])[0])
    return notes, arrays


def restore(notes: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Restores the state that `read` returned."""
    if "random/keras" in arrays:
        own = global_seed_generator(make=True)
        assign_values([components(own.state)], [arrays["random/keras"]])
    version, gauss = notes["python"]
    random.setstate((version, tuple(arrays["random/python"].tolist()), gauss))
    kind, position, has_gauss, cached = notes["numpy"]
    np.random.set_state((kind, arrays["random/numpy"], position, has_gauss, cached))
    tensorflow = _tensorflows_generator()
    if tensorflow is not None and "random/tensorflow" in arrays:
        tensorflow.reset(arrays["random/tensorflow"])


def _tensorflows_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's global generator; None if the program has none.

    With `enable_op_determinism` TensorFlow does not create one by itself.
    """
    try:
        return tf.random.get_global_generator()
    except RuntimeError:
        return None
