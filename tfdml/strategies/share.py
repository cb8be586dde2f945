"""One replica's share of a global batch: its rows, and what they weigh."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of one global batch that one replica works on.

    When a batch has fewer rows than there are replicas, some get a share of 0 rows; because
    TensorFlow's convolutions abort on an empty batch, such a replica computes on one row that is
    not its own (it is padded), and everything that comes of it is weighted with 0.

    Attributes:
        rows: The share's number of rows, 0 for a padded share: int64, shape `[]`.
        global_rows: The global batch's number of rows: int64, shape `[]`.
        working_replicas: The number of shares with rows: int64, shape `[]`.
    """

    rows: tf.Tensor
    global_rows: tf.Tensor
    working_replicas: tf.Tensor

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

    def drop_padding(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns `tensor` (`[computed_rows, ...]`) without the row of a padded share."""
        return tensor[: self.rows]


class Portion(NamedTuple):
    """What one process works on of a global batch; what its pipelines yield.

    Attributes:
        parts: For each of this process's replicas, the rows that it computes on.
        rows: Each replica's own rows, 0 for a padded one: int64, shape `[local replicas]`.
        global_rows: The global batch's number of rows: int64, shape `[]`.
        working_replicas: The number of replicas, of all processes, that have rows: int64, `[]`.
        digest: What all processes must find alike where each has read the whole batch, see
            `digest_of`; zeros where there is nothing to compare: float32, shape `[2]`.
    """

    parts: tuple
    rows: tf.Tensor
    global_rows: tf.Tensor
    working_replicas: tf.Tensor
    digest: tf.Tensor

    @property
    def shares(self) -> list[Share]:
        """The shares of this process's replicas."""
        return [
            Share(self.rows[i], self.global_rows, self.working_replicas)
            for i in range(len(self.parts))
        ]


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Splits global batches over replicas; this process's replicas are consecutive.

    Shares are consecutive, in the order of the replicas, and differ by one row at most; the first
    ones are the larger ones.

    Attributes:
        first_replica: This process's first replica.
        local_replicas: The number of its replicas.
        num_replicas: The number of all replicas.
    """

    first_replica: int
    local_replicas: int
    num_replicas: int

    def bounds(self, replica: int, global_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the first row of a replica's share and the one behind its last."""
        begin, end = (-(-(i * global_rows) // self.num_replicas) for i in (replica, replica + 1))
        return begin, end

    def portion(
        self, global_rows: tf.Tensor, take: Callable[[tf.Tensor, tf.Tensor], Any]
    ) -> Portion:
        """Returns this process's portion of a batch.

        Args:
            global_rows: The batch's rows: int64, shape `[]`.
            take: `take(begin, end)` returns the rows of the batch from `begin` to before `end`.
        """
        parts, rows = [], []
        for replica in range(self.first_replica, self.first_replica + self.local_replicas):
            begin, end = self.bounds(replica, global_rows)
            rows.append(end - begin)
            # A padded share computes on the last row of the batch.
            begin = tf.minimum(begin, global_rows - 1)
            parts.append(take(begin, tf.maximum(end, begin + 1)))
        working = tf.minimum(global_rows, self.num_replicas)
        return Portion(tuple(parts), tf.stack(rows), global_rows, working, tf.zeros([2]))

    def split(self, batch: Any) -> Portion:
        """Returns this process's portion of a global batch, a structure of `[rows, ...]`."""
        portion = self.portion(count_rows(batch), lambda b, e: take_rows(batch, b, e))
        return portion._replace(digest=digest_of(batch))

    def own_rows(self, batch: Any) -> Any:
        """Returns the rows of a global batch that this process's replicas share, unpadded."""
        rows = count_rows(batch)
        begin, _ = self.bounds(self.first_replica, rows)
        _, end = self.bounds(self.first_replica + self.local_replicas - 1, rows)
        return take_rows(batch, begin, end)


def take_rows(batch: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Returns the rows from `begin` to before `end` of every tensor of `batch`.

    Args:
        batch: A structure of tensors (dense, ragged or sparse) of shape `[rows, ...]`; scalars,
            None and optionals stay as they are.
        begin: The first row: int64, shape `[]`.
        end: The row behind the last one: int64, shape `[]`.
    """

    def rows(tensor):
        if not _has_rows(tensor):
            return tensor
        if isinstance(tensor, tf.SparseTensor):
            shape = tf.shape(tensor, tf.int64)
            start = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
            return tf.sparse.slice(tensor, start, tf.concat([[end - begin], shape[1:]], 0))
        return tensor[begin:end]

    return tf.nest.map_structure(rows, batch)


def count_rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch: int64, shape `[]`.

    Raises:
        ValueError: If no tensor of the batch has an axis 0.
    """
    for tensor in filter(_has_rows, tf.nest.flatten(batch)):
        if isinstance(tensor, tf.RaggedTensor):
            return tf.cast(tensor.nrows(), tf.int64)
        return tf.shape(tensor, tf.int64)[0]
    raise ValueError(
        f"A batch must hold a tensor whose axis 0 is the batch's rows, because the rows are "
        f"split over the replicas. Received: {batch}. Use `Dataset.batch` to make batches."
    )


def digest_of(batch: Any) -> tf.Tensor:
    """Returns 48 bits that follow from all bytes of a batch: float32, shape `[2]`.

    As two whole numbers below 2**24, which float32 holds exactly: so they travel with the metrics.
    """
    digest = tf.constant([0, 0, 0], tf.int64)
    for tensor in tf.nest.flatten(batch, expand_composites=True):
        if tensor is None or tensor.dtype in (tf.variant, tf.resource):
            continue
        # An axis more, because a fingerprint is made of each row; one element more for empty ones.
        flat = tf.reshape(tensor, [1, -1])
        if tensor.dtype != tf.string:
            flat = tf.concat([flat, tf.zeros([1, 1], tensor.dtype)], 1)
        own = tf.cast(tf.reshape(tf.fingerprint(flat), [-1]), tf.int64)[:6]
        digest = (digest * 31 + own[::2] * 256 + own[1::2]) % 65536
    high, middle, low = digest[0], digest[1], digest[2]
    return tf.cast(tf.stack([high * 256 + middle // 256, middle % 256 * 65536 + low]), tf.float32)


def _has_rows(tensor: Any) -> bool:
    if tensor is None or isinstance(tensor, tf.experimental.Optional):
        return False
    return tensor.shape.rank != 0
