"""One replica's share of a global batch: its rows, and what they weigh."""

import dataclasses
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of one global batch that one replica works on.

    Shares are consecutive, in the order of the replicas, and differ by one row at most. When a
    batch has fewer rows than there are replicas, the last ones get a share of 0 rows; because
    TensorFlow's convolutions abort on an empty batch, such a replica computes on one row that is
    not its own (`padded`), and everything that comes of it is weighted with 0.

    Attributes:
        begin: The share's first row in the global batch: int64, shape `[]`.
        rows: The share's number of rows, 0 for a padded share: int64, shape `[]`.
        global_rows: The global batch's number of rows: int64, shape `[]`.
        num_replicas: The number of shares.
    """

    begin: tf.Tensor
    rows: tf.Tensor
    global_rows: tf.Tensor
    num_replicas: int

    @property
    def computed_rows(self) -> tf.Tensor:
        """The rows that the replica computes on: `rows`, or 1 for a padded share."""
        return tf.maximum(self.rows, 1)

    def fraction(self, dtype: Any) -> tf.Tensor:
        """Returns the share's part of the global batch, from 0 to 1; over all replicas, 1."""
        return tf.cast(self.rows / self.global_rows, dtype)

    def present(self, dtype: Any) -> tf.Tensor:
        """Returns 1 for a share with rows, 0 for a padded one."""
        return tf.cast(self.rows > 0, dtype)

    def take(self, batch: Any) -> Any:
        """Returns this share's computed rows of every tensor of `batch`.

        Args:
            batch: A structure of tensors (dense, ragged or sparse) of shape `[global_rows, ...]`;
                None and scalars stay as they are.
        """
        begin = tf.minimum(self.begin, self.global_rows - 1)
        end = begin + self.computed_rows

        def rows(tensor):
            if tensor is None or tensor.shape.rank == 0:
                return tensor
            if isinstance(tensor, tf.SparseTensor):
                shape = tf.shape(tensor, tf.int64)
                start = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
                return tf.sparse.slice(tensor, start, tf.concat([[end - begin], shape[1:]], 0))
            return tensor[begin:end]

        return tf.nest.map_structure(rows, batch)

    def drop_padding(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns `tensor` (`[computed_rows, ...]`) without the row of a padded share."""
        return tensor[: self.rows]


def share_of(replica: int, num_replicas: int, global_rows: tf.Tensor) -> Share:
    """Returns the share of replica `replica` of a batch of `global_rows` rows.

    Args:
        replica: The replica, from 0 to `num_replicas - 1`.
        num_replicas: The number of replicas.
        global_rows: The batch's rows: int64, shape `[]`.
    """
    begin, end = (-(-(i * global_rows) // num_replicas) for i in (replica, replica + 1))
    return Share(begin, end - begin, global_rows, num_replicas)


def count_rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch: int64, shape `[]`.

    Raises:
        ValueError: If no tensor of the batch has an axis 0.
    """
    for tensor in tf.nest.flatten(batch):
        if tensor is None or tensor.shape.rank == 0:
            continue
        if isinstance(tensor, tf.RaggedTensor):
            return tf.cast(tensor.nrows(), tf.int64)
        return tf.shape(tensor, tf.int64)[0]
    raise ValueError(
        f"A batch must hold a tensor whose axis 0 is the batch's rows, because the rows are "
        f"split over the replicas. Received: {batch}. Use `Dataset.batch` to make batches."
    )
