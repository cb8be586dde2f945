"""Sums of sparse gradients: rows are gathered if that is fewer bytes, else the table is summed."""

import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients, gather_rows_of, on_device
from tfdml.collectives.collective import Collective

_INDEX_BYTES = 8


def sum_sparse(
    collective: Collective, gradients: StepGradients, name: str
) -> list[tf.IndexedSlices]:
    """Sums sparse gradients over all processes.

    An all-gather sends each rank's rows to all others; a ring all-reduce sends 2(N-1)/N of the
    whole table. The number of rows differs between ranks and steps, so the ranks first sum their
    row counts, in one small exchange for all gradients.

    Args:
        collective: Collective that moves tensors between N processes.
        gradients: This process's gradients, all `tf.IndexedSlices`.
        name: Prefix of the exchanges' names.

    Returns:
        The sums, with each row once.
    """
    slices = [_as_tensors(s) for s in gradients.values]
    if not slices or collective.size == 1:
        return slices
    counts = tf.stack([tf.shape(s.indices, tf.int64)[0] for s in slices])
    (totals,) = collective.all_reduce([counts], f"{name}/sparse_rows")
    sums = []
    for i, own in enumerate(slices):
        with on_device(gradients.devices, [i]) as device:
            sums.append(_sum(collective.on(device), own, totals[i], f"{name}/sparse_{i}"))
    return sums


def is_sparse_fewer(rows: tf.Tensor, row_bytes: int, table_rows: tf.Tensor) -> tf.Tensor:
    """Returns whether gathering rows sends fewer bytes than summing the whole table.

    Both sides are the bytes that a rank sends, times N / (N - 1): all ranks' rows, or twice the
    table.

    Args:
        rows: Rows of all ranks together.
        row_bytes: Bytes of a row's values.
        table_rows: Rows of the whole table.
    """
    return rows * (row_bytes + _INDEX_BYTES) < 2 * table_rows * row_bytes


def _as_tensors(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    shape = slices.dense_shape
    return tf.IndexedSlices(
        tf.convert_to_tensor(slices.values),
        tf.convert_to_tensor(slices.indices),
        shape if shape is None else tf.convert_to_tensor(shape),
    )


def _sum(
    collective: Collective, own: tf.IndexedSlices, rows: tf.Tensor, name: str
) -> tf.IndexedSlices:
    def gathered() -> tuple[tf.Tensor, tf.Tensor]:
        total = gather_rows_of(collective, own, name)
        return total.values, total.indices

    def summed() -> tuple[tf.Tensor, tf.Tensor]:
        (total,) = collective.all_reduce([tf.convert_to_tensor(own)], f"{name}_whole")
        return total, tf.range(tf.cast(table, own.indices.dtype))

    width = own.values.shape[1:].num_elements()
    if own.dense_shape is None or width is None or not collective.branches:
        return tf.IndexedSlices(*gathered(), own.dense_shape)
    table = tf.cast(own.dense_shape[0], tf.int64)
    fewer = is_sparse_fewer(rows, width * own.values.dtype.size, table)
    # The shape stays outside the branches, whose outputs would have an unknown one.
    return tf.IndexedSlices(*tf.cond(fewer, gathered, summed), own.dense_shape)
