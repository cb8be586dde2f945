"""One replica's share of a global batch: its rows, and their weight."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdml.row_split import LocalReplicas

# The spec that represents None in a `tf.data` element's spec.
_NONE_SPEC = type(tf.type_spec_from_value(None))
# Number of bytes of a batch's digest.
DIGEST_SIZE = 8


@dataclasses.dataclass(frozen=True)
class ShareInfo:
    """Part of one global batch that one replica works on.

    If a batch has fewer rows than replicas, some get a share of 0 rows. TensorFlow's convolutions
    abort on an empty batch, so such a replica computes on one row that is not its own (the share is
    padded), and all its results get weight 0.

    Attributes:
        rows: Number of rows of the share, 0 for a padded share: int64, shape `[]`.
        global_rows: Number of rows of the global batch: int64, shape `[]`.
    """

    rows: tf.Tensor
    global_rows: tf.Tensor

    def fraction(self, dtype: Any) -> tf.Tensor:
        """Returns the share's fraction of the global batch, from 0 to 1; they sum to 1."""
        return tf.cast(self.rows / self.global_rows, dtype)

    def present(self, dtype: Any) -> tf.Tensor:
        """Returns 1 for a share with rows, 0 for a padded one."""
        return tf.cast(self.rows > 0, dtype)

    def drop_padding(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a replica's result, `[rows, ...]`, without the row of a padded share."""
        return tensor[: self.rows]


class LocalBatch(NamedTuple):
    """One process's part of a global batch, as its pipelines yield it.

    Attributes:
        parts: The rows that each of this process's replicas computes on.
        rows: Number of each replica's own rows, 0 for a padded share: int64, shape
            `[local replicas]`.
        global_rows: Number of rows of the global batch: int64, shape `[]`.
        digest: Digest of the global batch, which must be the same on all processes if each has
            read it, see `digest_of`; zeros if there is nothing to compare: float32, shape
            `[DIGEST_SIZE]`.
    """

    parts: tuple
    rows: tf.Tensor
    global_rows: tf.Tensor
    digest: tf.Tensor

    @property
    def shares(self) -> list[ShareInfo]:
        """The shares of this process's replicas."""
        return [ShareInfo(self.rows[i], self.global_rows) for i in range(len(self.parts))]


class GlobalBatch(NamedTuple):
    """A global batch that its step splits, by the weights that hold then; see `DeferredSplitter`.

    Attributes:
        rows: Structure of tensors of shape `[rows, ...]`.
        digest: As in `LocalBatch`.
    """

    rows: Any
    digest: tf.Tensor

    @property
    def global_rows(self) -> tf.Tensor | int:
        """The number of rows of the global batch."""
        return count_rows(self.rows)


class BatchSplitter(LocalReplicas):
    """Splitter of global batches over replicas."""

    def weights_in_graph(self) -> Any:
        """Returns the weights that hold when the graph being traced runs; see `LocalReplicas`."""
        return self.weights

    def local_batch(
        self, global_rows: tf.Tensor | int, take: Callable[[tf.Tensor | int, tf.Tensor | int], Any]
    ) -> LocalBatch:
        """Returns this process's local batch of a batch.

        Args:
            global_rows: Number of rows of the batch, as in `bounds`. A Python number costs no
                operation.
            take: `take(begin, end)` returns the rows of the batch from `begin` to before `end`.
        """
        # NumPy numbers become constants of the graph; TensorFlow's would be computed in it.
        edges = self.bounds(global_rows)
        least, most = (tf.minimum, tf.maximum) if tf.is_tensor(edges) else (min, max)
        parts = []
        for i in range(self.local_replicas):
            # A padded share computes on the last row of the batch.
            begin = least(edges[i], global_rows - 1)
            parts.append(take(begin, most(edges[i + 1], begin + 1)))
        return LocalBatch(
            tuple(parts),
            rows=tf.convert_to_tensor(edges[1:] - edges[:-1]),
            global_rows=tf.convert_to_tensor(global_rows, tf.int64),
            digest=tf.zeros([DIGEST_SIZE]),
        )

    def split(self, batch: Any) -> LocalBatch:
        """Returns this process's local batch of a global batch, a structure of `[rows, ...]`."""
        local_batch = self.local_batch(count_rows(batch), lambda b, e: take_rows(batch, b, e))
        return local_batch._replace(digest=digest_of(batch))

    def split_whole(self, batch: GlobalBatch) -> LocalBatch:
        """Returns this process's local batch of a global batch that was left whole."""
        take = lambda begin, end: take_rows(batch.rows, begin, end)  # noqa: E731
        return self.local_batch(batch.global_rows, take)._replace(digest=batch.digest)

    def own_rows(self, batch: Any) -> Any:
        """Returns this process's rows of a global batch, without padding."""
        edges = self.bounds(count_rows(batch))
        return take_rows(batch, edges[0], edges[-1])


@dataclasses.dataclass(frozen=True)
class DeferredSplitter(BatchSplitter):
    """Splitter for pipelines that read ahead while weights may change: steps split their batches.

    Attributes:
        weights: The weights now, for data of which the process reads its part alone.
        read_weights: Function that returns an int64 tensor of the weights when a graph runs.
    """

    read_weights: Callable[[], tf.Tensor] | None = None

    def weights_in_graph(self) -> tf.Tensor:
        """Returns the weights that hold when the graph being traced runs."""
        return self.read_weights()

    def split(self, batch: Any) -> GlobalBatch:
        """Returns a global batch as it is."""
        return GlobalBatch(batch, digest_of(batch))


def take_rows(batch: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Returns the rows from `begin` to before `end` of every tensor of `batch`.

    Args:
        batch: A structure of tensors (dense, ragged or sparse) of shape `[rows, ...]`; scalars,
            None and optionals are returned unchanged.
        begin: First row: int64, shape `[]`.
        end: Row after the last one: int64, shape `[]`.
    """

    def rows(tensor):
        if not _has_rows(tensor):
            return tensor
        if isinstance(tensor, tf.SparseTensor):
            shape = tf.shape(tensor, tf.int64)
            start = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
            cut = tf.sparse.slice(tensor, start, tf.concat([[end - begin], shape[1:]], 0))
            # TensorFlow does not infer a sparse slice's shape, but layers need it to build.
            known = [shape[i] if n is None else n for i, n in enumerate(tensor.shape)]
            rows = tf.stack([tf.cast(n, tf.int64) for n in (end - begin, *known[1:])])
            return tf.SparseTensor(cut.indices, cut.values, rows)
        return tensor[begin:end]

    return tf.nest.map_structure(rows, batch)


def count_rows(batch: Any) -> tf.Tensor | int:
    """Returns the number of rows of a batch: a Python number if known, else int64 of shape `[]`.

    Raises:
        ValueError: If no tensor of the batch has an axis 0.
    """
    for tensor in filter(_has_rows, tf.nest.flatten(batch)):
        if isinstance(tensor, tf.RaggedTensor):
            return tf.cast(tensor.nrows(), tf.int64)
        return tensor.shape[0] or tf.shape(tensor, tf.int64)[0]
    raise ValueError(
        f"A batch must hold a tensor whose axis 0 is the batch's rows, because the rows are "
        f"split over the replicas. Received: {batch}. Use `Dataset.batch` to make batches."
    )


def rows_or_zero(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, 0 for one without rows: int64, shape `[]`."""
    try:
        return tf.convert_to_tensor(count_rows(batch), tf.int64)
    except ValueError:
        return tf.zeros([], tf.int64)


def as_tensors(batch: Any) -> Any:
    """Converts NumPy arrays and pandas tables in a batch to tensors."""

    def as_tensor(value: Any) -> Any:
        is_array = isinstance(value, np.ndarray) or hasattr(value, "iloc")
        return tf.convert_to_tensor(value) if is_array else value

    return tf.nest.map_structure(as_tensor, batch)


def digest_of(batch: Any) -> tf.Tensor:
    """Returns a 64-bit digest of all bytes of a batch: float32, shape `[DIGEST_SIZE]`.

    Each entry is an integer below 256, which float32 holds exactly, so that the digest can travel
    with the metrics.
    """
    # `tf.fingerprint` works per row, so each tensor is reshaped to a single row.
    fingerprints = [
        tf.fingerprint(tf.reshape(tensor, [1, -1]))
        for tensor in tf.nest.flatten(batch, expand_composites=True)
        if tensor is not None and tensor.dtype not in (tf.variant, tf.resource)
    ]
    if not fingerprints:
        return tf.zeros([DIGEST_SIZE])
    return tf.cast(tf.fingerprint(tf.concat(fingerprints, 1))[0], tf.float32)


def unpacked(element: tuple) -> Any:
    """Returns a dataset's element from the arguments that `Dataset.map` passed.

    `Dataset.map` passes a tuple's parts as separate arguments, and anything else as one argument.
    """
    return element if len(element) > 1 else element[0]


def without_optionals(structure: Any) -> Any:
    """Replaces optionals in a structure of values or specs by None."""

    def leaf(value):
        absent = isinstance(value, tf.experimental.Optional | tf.OptionalSpec | _NONE_SPEC)
        return None if absent else value

    return tf.nest.map_structure(leaf, structure)


def _has_rows(tensor: Any) -> bool:
    if tensor is None or isinstance(tensor, tf.experimental.Optional):
        return False
    return tensor.shape.rank != 0
