"""Concatenation of all replicas' rows into one tensor: dense, ragged or sparse."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective

Rows = tf.Tensor | tf.RaggedTensor | tf.SparseTensor


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenates tensors of one kind along axis 0.

    Args:
        parts: Tensors of shape `[rows, ...]`.
    """
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    return tf.concat(list(parts), 0)


def gather_rows(collective: Collective, own: Rows, name: str) -> Rows:
    """Gathers the rows of all processes, in the order of their ranks.

    Args:
        collective: Collective that gathers them.
        own: This process's rows: shape `[rows, ...]`.
        name: Prefix of the exchanges' names.
    """
    if collective.size == 1:
        return own
    if isinstance(own, tf.RaggedTensor):
        values = gather_rows(collective, own.values, f"{name}/values")
        lengths = collective.all_gather(own.row_lengths(), f"{name}/lengths")
        return tf.RaggedTensor.from_row_lengths(values, lengths)
    if isinstance(own, tf.SparseTensor):
        shape = tf.cast(own.dense_shape, tf.int64)
        shapes = collective.all_gather(shape[tf.newaxis], f"{name}/shapes")
        before = tf.reduce_sum(shapes[: collective.rank, 0])
        first = tf.one_hot(0, tf.size(shape), on_value=before, off_value=tf.zeros_like(before))
        indices = collective.all_gather(own.indices + first, f"{name}/indices")
        values = collective.all_gather(own.values, f"{name}/values")
        whole = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
        return tf.SparseTensor(indices, values, whole)
    return collective.all_gather(own, name)
