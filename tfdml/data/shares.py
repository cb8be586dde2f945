"""A dataset of one worker's rows of each global batch, as strategies ask for them."""

from typing import Any

import tensorflow as tf


class OwnShares(tf.data.Dataset):
    """One worker's rows of each global batch.

    Args:
        shares: A dataset of them.
        steps: The global batches of a whole epoch; a worker may have no rows of the last one.
    """

    def __init__(self, shares: tf.data.Dataset, steps: int):
        self._shares, self._steps = shares, steps
        super().__init__(shares._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._shares]

    @property
    def element_spec(self) -> Any:
        """What a share is made of."""
        return self._shares.element_spec

    def cardinality(self) -> tf.Tensor:
        """Returns the global batches of a whole epoch."""
        return tf.constant(self._steps, tf.int64)
