"""Packing of a step's results into few tensors, which saves the chief a message per tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Numbers from which on a tensor is sent by itself: a message costs less than a copy.
_LARGE = 1 << 15


class GradientPacking:
    """Joins a share's small and sparse gradients into one vector for each dtype.

    A sparse gradient has three tensors, and a table's has as many as the table has parts.

    Args:
        gradients: Dense or sparse gradients, in a graph; only their types are used.
    """

    def __init__(self, gradients: Sequence):
        self._types = tf.nest.map_structure(tf.type_spec_from_value, list(gradients))
        tensors = tf.nest.flatten(gradients, expand_composites=True)
        # The indices of the tensors in each vector, and their shapes, with -1 for an open number.
        self._joined: dict[str, list[int]] = {}
        self._shapes: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            shape = None if tensor.shape.rank is None else tensor.shape.as_list()
            size = tensor.shape.num_elements()
            if shape is not None and shape.count(None) <= 1 and (size is None or size < _LARGE):
                self._joined.setdefault(tensor.dtype.name, []).append(i)
                self._shapes[i] = [-1 if n is None else n for n in shape]
        self._alone = [i for i in range(len(tensors)) if i not in self._shapes]

    def pack(self, gradients: Sequence) -> dict[str, Any]:
        """Returns the tensors to send."""
        tensors = tf.nest.flatten(gradients, expand_composites=True)
        return {
            "alone": [tensors[i] for i in self._alone],
            "joined": {
                dtype: tf.concat([tf.reshape(tensors[i], [-1]) for i in indices], 0)
                for dtype, indices in self._joined.items()
            },
            "sizes": {
                dtype: tf.stack([tf.size(tensors[i]) for i in indices])
                for dtype, indices in self._joined.items()
            },
        }

    def unpack(self, packed: dict[str, Any]) -> list:
        """Returns the gradients that `pack` has packed."""
        tensors = dict(zip(self._alone, packed["alone"], strict=True))
        for dtype, indices in self._joined.items():
            parts = tf.split(packed["joined"][dtype], packed["sizes"][dtype], num=len(indices))
            for i, part in zip(indices, parts, strict=True):
                tensors[i] = tf.reshape(part, self._shapes[i])
        in_order = [tensors[i] for i in range(len(tensors))]
        return tf.nest.pack_sequence_as(self._types, in_order, expand_composites=True)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Packs tensors of any dtype into a float64 vector, which holds float32 and counts exactly.

    Args:
        tensors: Tensors with static shapes.
    """
    if not tensors:
        return tf.zeros([0], tf.float64)
    return tf.concat([tf.reshape(tf.cast(t, tf.float64), [-1]) for t in tensors], 0)


def unpack(vector: tf.Tensor, like: Sequence) -> list[tf.Tensor]:
    """Returns the tensors of a vector.

    Args:
        vector: Result of `pack`, or a sum of such vectors.
        like: Variables with the shapes and dtypes of the packed tensors.
    """
    sizes = [int(np.prod(v.shape)) for v in like]
    parts = tf.split(vector, sizes) if sizes else []
    return [tf.cast(tf.reshape(p, v.shape), v.dtype) for p, v in zip(parts, like, strict=True)]
