"""Exchanges of ids, rows and gradients of tables that are dealt to the ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.row_deal import RowDeal
from tfdml.strategies.sharded.row_codecs import ROW_CODECS, RowCodec


class Wanted(NamedTuple):
    """Rows of a table that this rank needs in a step.

    Attributes:
        deal: The division of the table.
        rows: Which rows of their owner's part, in the order of the owners: int32 or int64.
        counts: How many of each rank: int32, shape `[ranks]`.
        places: For each local replica, where each of its ids is among `rows`.
    """

    deal: RowDeal
    rows: tf.Tensor
    counts: tf.Tensor
    places: list[tf.Tensor]


class Asked(NamedTuple):
    """Rows of this rank's part of a table that the ranks need in a step.

    Attributes:
        rows: Which rows, in the order of the ranks.
        counts: How many each rank needs: int32, shape `[ranks]`.
    """

    rows: tf.Tensor
    counts: tf.Tensor


def wanted_rows(deal: RowDeal, ids: Sequence[tf.Tensor]) -> Wanted:
    """Returns which rows this rank needs, each once.

    Args:
        deal: The division of the table.
        ids: The ids that each local replica looks up: int32 or int64, shape `[n]`.
    """
    # Half the bytes, if that many rows can be counted.
    dtype = tf.int32 if deal.shape[0] <= tf.int32.max else tf.int64
    rows, places = tf.unique(tf.cast(tf.concat(list(ids), 0), dtype))
    owners = tf.cast(rows % deal.ranks, tf.int32)
    order = tf.argsort(owners, stable=True)
    counts = tf.math.bincount(owners, minlength=deal.ranks, maxlength=deal.ranks)
    counts = tf.ensure_shape(counts, [deal.ranks])
    places = tf.gather(tf.math.invert_permutation(order), places)
    own = tf.gather(rows // deal.ranks, order)
    return Wanted(deal, own, counts, tf.split(places, [tf.size(i) for i in ids]))


def exchange_ids(collective: Collective, wanted: Sequence[Wanted], name: str) -> list[Asked]:
    """Tells the owners which rows of their tables this rank needs.

    Args:
        collective: Collective between the ranks.
        wanted: The rows of each table that this rank needs.
        name: Name of the exchange.
    """
    tables, ranks = len(wanted), collective.size
    dtype = tf.int64 if any(w.rows.dtype == tf.int64 for w in wanted) else tf.int32
    # Each rank gets the numbers of its rows first: how many of each table.
    numbers = tf.stack([w.counts for w in wanted], 1)
    heads = tf.cast(tf.reshape(numbers, [-1]), dtype)
    pieces = [(heads, tf.fill([ranks], tables))]
    pieces += [(tf.cast(w.rows, dtype), w.counts) for w in wanted]
    packed, counts = _pack(pieces)
    received, sizes = collective.all_to_all_ragged(packed, counts, name)
    begins = tf.cumsum(sizes, exclusive=True)
    asked = tf.gather(received, begins[:, tf.newaxis] + tf.range(tables))
    asked = tf.ensure_shape(tf.cast(asked, tf.int32), [ranks, tables])
    lengths = tf.concat([tf.fill([ranks, 1], tables), asked], 1)
    rows = _unpack(received, lengths)[1:]
    return [
        Asked(tf.cast(own, w.rows.dtype), asked[:, i])
        for i, (own, w) in enumerate(zip(rows, wanted, strict=True))
    ]


def exchange_rows(
    collective: Collective,
    rows: Sequence[tf.Tensor],
    counts: Sequence[tf.Tensor],
    received_counts: Sequence[tf.Tensor],
    name: str,
    codec: RowCodec = ROW_CODECS[None],
) -> list[tf.Tensor]:
    """Sends rows of several tables, or their gradients, to the ranks; returns those received.

    Args:
        collective: Collective between the ranks.
        rows: For each table the rows, in the order of the ranks that get them.
        counts: For each table how many each rank gets: int32, shape `[ranks]`.
        received_counts: For each table how many come from each rank.
        name: Name of the exchange.
        codec: Encoding of the rows on the way.
    """
    dtypes, rows = [r.dtype for r in rows], [codec.encode(r) for r in rows]
    received: list[tf.Tensor | None] = [None] * len(rows)
    for dtype in sorted({r.dtype for r in rows}, key=lambda d: d.name):
        indices = [i for i, r in enumerate(rows) if r.dtype == dtype]
        widths = [rows[i].shape[1:].num_elements() for i in indices]
        pieces = [
            (tf.reshape(rows[i], [-1]), counts[i] * width)
            for i, width in zip(indices, widths, strict=True)
        ]
        flat, _ = collective.all_to_all_ragged(*_pack(pieces), f"{name}/{dtype.name}")
        lengths = [received_counts[i] * width for i, width in zip(indices, widths, strict=True)]
        for i, numbers in zip(indices, _unpack(flat, tf.stack(lengths, 1)), strict=True):
            received[i] = codec.decode(tf.reshape(numbers, [-1, *rows[i].shape[1:]]), dtypes[i])
    return received


def _pack(pieces: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor]:
    """Joins vectors so that what a rank gets is in one place.

    Args:
        pieces: Vectors of one dtype, in the order of the ranks that get their numbers, and how many
            numbers each rank gets.

    Returns:
        A vector, and how many of its numbers each rank gets: int32, shape `[ranks]`.
    """
    values, counts = zip(*pieces, strict=True)
    ranks, vectors = counts[0].shape[0], len(counts)
    by_vector = _rows(tf.concat(values, 0), tf.concat(counts, 0))
    order = [vector * ranks + rank for rank in range(ranks) for vector in range(vectors)]
    return tf.gather(by_vector, order).flat_values, tf.add_n(counts)


def _unpack(received: tf.Tensor, lengths: tf.Tensor) -> list[tf.Tensor]:
    """Returns the vectors that were joined by `_pack` on each rank, in the order of the ranks.

    Args:
        received: The numbers from all ranks.
        lengths: How many each rank has sent of each vector: int32, shape `[ranks, vectors]`.
    """
    ranks, vectors = lengths.shape
    pieces = _rows(received, tf.reshape(lengths, [-1]))
    return [
        tf.gather(pieces, tf.range(i, ranks * vectors, vectors)).flat_values for i in range(vectors)
    ]


def _rows(numbers: tf.Tensor, lengths: tf.Tensor) -> tf.RaggedTensor:
    """Returns a vector in pieces of so many numbers.

    No assertion checks them: TensorFlow would run it after those of lookups, which may depend on
    the exchange that the pieces are for.
    """
    return tf.RaggedTensor.from_row_lengths(numbers, lengths, validate=False)
