"""Lookups in tables that are dealt to the ranks: ids to the rows' owners, rows back.

In the graph of a step, the lookups in all tables are exchanged together: one exchange of ids, one
of rows, and one of their gradients. Keras calls one layer after the other, and each must return a
tensor at once. So each gets a stand-in, and when the step is traced, what uses the stand-ins is
given the tensors of the exchanges.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.row_deal import RowDeal
from tfdml.strategies.replicas.extended import ReplicaExtended


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


# -- Exchanges of all tables of a step ------------------------------------------------------------


def exchange_ids(collective: Collective, wanted: Sequence[Wanted], name: str) -> list[Asked]:
    """Tells the owners which rows of their tables this rank needs.

    Args:
        collective: Collective between the ranks.
        wanted: What this rank needs of each table.
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
) -> list[tf.Tensor]:
    """Sends rows of several tables, or their gradients, to the ranks; returns those received.

    Args:
        collective: Collective between the ranks.
        rows: For each table the rows, in the order of the ranks that get them.
        counts: For each table how many each rank gets: int32, shape `[ranks]`.
        received_counts: For each table how many come from each rank.
        name: Name of the exchange.
    """
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
            received[i] = tf.reshape(numbers, [-1, *rows[i].shape[1:]])
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


# -- Lookups --------------------------------------------------------------------------------------


class Lookup:
    """A lookup in a table.

    Args:
        wanted: The rows that this rank needs.

    Attributes:
        wanted: The rows that this rank needs.
        asked: The rows that the ranks need of this one.
    """

    def __init__(self, wanted: Wanted):
        self.wanted = wanted
        self.asked: Asked | None = None


class Exchanges:
    """Exchanges of one lookup after the other.

    Args:
        extended: The strategy's extended part.
    """

    def __init__(self, extended: ReplicaExtended):
        self._extended = extended

    def ask(self, lookup: Lookup) -> None:
        """Exchanges the ids of a lookup, which gets to know what is asked of this rank."""
        name = self._extended.unique_name("table_ids")
        (lookup.asked,) = exchange_ids(self._extended.collective, [lookup.wanted], name)

    def send_rows(self, lookup: Lookup, rows: tf.Tensor) -> tf.Tensor:
        """Sends the rows that the ranks have asked for; returns those that this rank wants."""
        return self._exchanged("table_rows", rows, lookup.asked.counts, lookup.wanted.counts)

    def send_gradients(self, lookup: Lookup, gradients: tf.Tensor) -> tf.Tensor:
        """Sends the gradients of the rows that this rank wanted; returns those of its own rows."""
        asked, wanted = lookup.asked.counts, lookup.wanted.counts
        return self._exchanged("table_gradients", gradients, wanted, asked)

    def _exchanged(
        self, kind: str, rows: tf.Tensor, counts: tf.Tensor, received_counts: tf.Tensor
    ) -> tf.Tensor:
        name = self._extended.unique_name(kind)
        collective = self._extended.collective
        return exchange_rows(collective, [rows], [counts], [received_counts], name)[0]


@dataclasses.dataclass
class _Late:
    """Exchange of rows that is made when the step is traced.

    Attributes:
        rows: The rows to send.
        counts: How many each rank gets.
        received_counts: How many come from each rank.
        stand_in: Stand-in for the rows received.
    """

    rows: tf.Tensor
    counts: tf.Tensor
    received_counts: tf.Tensor
    stand_in: tf.Tensor


class LateExchanges(Exchanges):
    """Exchanges of all lookups in the graph of a step, made together when the step is traced.

    Lookups whose ids depend on rows of others are exchanged after them, and so are those that
    follow an update, which read the rows that it has changed.

    Args:
        extended: The strategy's extended part.
    """

    def __init__(self, extended: ReplicaExtended):
        super().__init__(extended)
        self.graph = tf.compat.v1.get_default_graph()
        self._ids: list[list[Lookup]] = [[]]
        self._rows: list[list[_Late]] = [[]]
        self._gradients: list[list[_Late]] = [[]]

    def ask(self, lookup: Lookup) -> None:
        """Gives a lookup stand-ins for what is asked of this rank."""
        if _depends(lookup.wanted.rows, self._rows[-1]):
            self._begin_lookups()
        rows, counts = lookup.wanted.rows, lookup.wanted.counts
        lookup.asked = Asked(_stand_in(rows, [None]), _stand_in(counts, counts.shape))
        self._ids[-1].append(lookup)

    def send_rows(self, lookup: Lookup, rows: tf.Tensor) -> tf.Tensor:
        """Returns a stand-in for the rows that this rank wants."""
        late = _Late(
            rows,
            lookup.asked.counts,
            lookup.wanted.counts,
            _stand_in(rows, [None, *lookup.wanted.deal.row_shape]),
        )
        # The group that the lookup's ids are in.
        (number,) = (i for i, group in enumerate(self._ids) if lookup in group)
        self._rows[number].append(late)
        return late.stand_in

    def send_gradients(self, lookup: Lookup, gradients: tf.Tensor) -> tf.Tensor:
        """Returns a stand-in for the gradients of this rank's rows."""
        if _depends(gradients, self._gradients[-1]):
            self._gradients.append([])
        stand_in = _stand_in(gradients, [None, *lookup.wanted.deal.row_shape])
        counts = lookup.wanted.counts, lookup.asked.counts
        self._gradients[-1].append(_Late(gradients, *counts, stand_in))
        return stand_in

    def end_group(self) -> None:
        """Ends the present groups; called before an update."""
        self._begin_lookups()
        self._gradients.append([])

    def _begin_lookups(self) -> None:
        self._ids.append([])
        self._rows.append([])

    def make(self) -> None:
        """Makes the exchanges, and gives their results to what uses the stand-ins."""
        made: list[tuple[tf.Tensor, tf.Tensor]] = []
        for lookups, rows in zip(self._ids, self._rows, strict=True):
            made += self._exchange_ids(lookups)
            made += self._exchange_rows("table_rows", rows)
        for gradients in self._gradients:
            made += self._exchange_rows("table_gradients", gradients)
        # Afterwards, because exchanges use stand-ins, too.
        for stand_in, tensor in made:
            _replace(stand_in, tensor)

    def _exchange_ids(self, lookups: list[Lookup]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns the lookups' stand-ins for what is asked of this rank, and their values."""
        if not lookups:
            return []
        wanted = [lookup.wanted for lookup in lookups]
        name = self._extended.unique_name("table_ids")
        found = exchange_ids(self._extended.collective, wanted, name)
        stand_ins = [stand_in for lookup in lookups for stand_in in lookup.asked]
        return list(zip(stand_ins, [t for asked in found for t in asked], strict=True))

    def _exchange_rows(self, kind: str, late: list[_Late]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns the stand-ins for the rows that are received, and their values."""
        if not late:
            return []
        received = exchange_rows(
            self._extended.collective,
            [each.rows for each in late],
            [each.counts for each in late],
            [each.received_counts for each in late],
            self._extended.unique_name(kind),
        )
        return list(zip([each.stand_in for each in late], received, strict=True))


def _stand_in(like: tf.Tensor, shape: Any) -> tf.Tensor:
    """Returns a tensor of the graph that is replaced before the graph runs."""
    empty = tf.zeros([0 if n is None else n for n in tf.TensorShape(shape)], like.dtype)
    return tf.compat.v1.placeholder_with_default(empty, shape)


def _replace(stand_in: tf.Tensor, tensor: tf.Tensor) -> None:
    """Gives a tensor to all operations that use its stand-in."""
    tensor = tf.ensure_shape(tensor, stand_in.shape)
    for operation in stand_in.consumers():
        for index, used in enumerate(operation.inputs):
            if used is stand_in:
                operation._update_input(index, tensor)


def _depends(tensor: tf.Tensor, late: Sequence[_Late]) -> bool:
    """Returns whether a tensor is computed from one of the stand-ins."""
    stand_ins = {id(each.stand_in.op) for each in late}
    seen: set[int] = set()
    waiting = [tensor.op] if stand_ins else []
    while waiting:
        operation = waiting.pop()
        if id(operation) in stand_ins:
            return True
        if id(operation) not in seen:
            seen.add(id(operation))
            waiting += [used.op for used in operation.inputs]
    return False


@contextlib.contextmanager
def together(extended: ReplicaExtended) -> Iterator[None]:
    """Context manager: the exchanges of all lookups in a step's graph are made on exit."""
    if tf.executing_eagerly() or not extended.collective.runs_in_any_order:
        yield
        return
    extended.late_exchanges = LateExchanges(extended)
    try:
        yield
        extended.late_exchanges.make()
    finally:
        extended.late_exchanges = None


def _exchanges(extended: ReplicaExtended) -> Exchanges:
    """Returns the exchanges of the step whose graph is traced; elsewhere they are made at once."""
    late = extended.late_exchanges
    is_late = late is not None and late.graph is tf.compat.v1.get_default_graph()
    return late if is_late else Exchanges(extended)


def look_up(
    extended: ReplicaExtended,
    deal: RowDeal,
    read: Callable[[tf.Tensor], tf.Tensor],
    ids: tf.Tensor,
) -> tf.Tensor:
    """Returns rows of a table; all replicas of all ranks call this.

    The gradient goes the same way back: the owner of a row gets the sum over all replicas.

    Args:
        extended: The strategy's extended part.
        deal: The division of the table.
        read: Function that returns rows of this rank's part, given their indices.
        ids: Row numbers of the whole table: int32 or int64, any shape.

    Returns:
        The rows: shape `[*ids.shape, *row_shape]`.
    """

    def ask(flat: list[tf.Tensor]) -> list[tuple]:
        lookup = Lookup(wanted_rows(deal, flat))
        _exchanges(extended).ask(lookup)
        own = _on_devices(extended, lookup.asked.rows, len(flat))
        return [(lookup, *pair) for pair in zip(own, lookup.wanted.places, strict=True)]

    lookup, own, places = _of_all(extended, ask, tf.reshape(ids, [-1]))

    @tf.custom_gradient
    def to_askers(rows: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def send(copies: list[tf.Tensor]) -> list[tf.Tensor]:
            # All replicas have read the same rows.
            received = _exchanges(extended).send_rows(lookup, copies[0])
            return _on_devices(extended, received, len(copies))

        def send_back(upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            own = _exchanges(extended).send_gradients(lookup, tf.add_n(upstream))
            return _on_devices(extended, own, len(upstream))

        def gradient(upstream: Any) -> tf.Tensor:
            return _of_all(extended, send_back, tf.convert_to_tensor(upstream))

        return _of_all(extended, send, rows), gradient

    rows = tf.gather(to_askers(read(own)), places)
    shape = tf.concat([tf.shape(ids), deal.row_shape], 0)
    return tf.ensure_shape(tf.reshape(rows, shape), [*ids.shape, *deal.row_shape])


def _of_all(extended: ReplicaExtended, function: Callable, value: tf.Tensor) -> Any:
    """Calls a function once for all of this rank's replicas; returns the caller's result.

    Outside of replicas there is one caller.

    Args:
        extended: The strategy's extended part.
        function: Function of the callers' values; returns their results.
        value: The caller's value.
    """

    def merge(_: tf.distribute.Strategy, values: Any) -> Any:
        with tf.device(extended.local_devices[0]):
            return extended.replica_values(function(extended.parts_of(values)))

    replica = tf.distribute.get_replica_context()
    if replica is not None and replica.strategy.extended is extended:
        return replica.merge_call(merge, args=(value,))
    return function([value])[0]


def _on_devices(extended: ReplicaExtended, tensor: tf.Tensor, number: int) -> list[tf.Tensor]:
    """Returns copies of a tensor on the first devices of this rank."""
    copies = []
    for device in extended.local_devices[:number]:
        with tf.device(device):
            copies.append(tf.identity(tensor))
    return copies
