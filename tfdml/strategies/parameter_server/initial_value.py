"""Initial values of variables on servers, which are made where they are kept."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class InitialValue:
    """Initial value of a variable, or of some of its rows.

    TensorFlow calls it for the whole variable, or for each part.

    Args:
        shape: The variable's shape.
        dtype: Its dtype.
        whole: Function that returns the whole value.
        rows: Function of the first row and the number of rows that returns those rows.
    """

    def __init__(
        self,
        shape: tf.TensorShape,
        dtype: tf.DType,
        whole: Callable[[], tf.Tensor],
        rows: Callable[[int, int], tf.Tensor],
    ):
        self.shape, self.dtype = shape, dtype
        self._whole, self._rows = whole, rows

    def __call__(self, shard_info: Any = None) -> tf.Tensor:
        """Returns the value.

        Args:
            shard_info: The shape and the offset of a part; None for the whole.
        """
        if shard_info is None:
            return self._whole()
        return self._rows(shard_info.offset[0], shard_info.shape[0])
