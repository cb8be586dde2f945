"""Exchanges of all lookups in the graph of a step, made together.

Keras calls one layer after the other, and each must return a tensor at once. So each lookup gets a
stand-in, and when the step is traced, what uses the stand-ins is given the tensors of the
exchanges: one of ids, one of rows, and one of their gradients, for all tables.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.sharded.row_codecs import ROW_CODECS
from tfdml.strategies.sharded.table_exchange import Asked, Wanted, exchange_ids, exchange_rows


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
        self._collective = extended.collective
        self._codec = ROW_CODECS[extended.options.sharding.row_codec]

    def ask(self, lookup: Lookup) -> None:
        """Exchanges the ids of a lookup, which gets to know what is asked of this rank."""
        name = self._extended.unique_name("table_ids")
        (lookup.asked,) = exchange_ids(self._collective, [lookup.wanted], name)

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
        return exchange_rows(
            self._collective, [rows], [counts], [received_counts], name, codec=self._codec
        )[0]


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
        collective: The strategy's collective, in any order. These exchanges are made last in the
            step's graph, after those of the layers' gradients, which are computed from their rows:
            in the order of making, each would wait for the other.
    """

    def __init__(self, extended: ReplicaExtended, collective: Collective):
        super().__init__(extended)
        self._collective = collective
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
        found = exchange_ids(self._collective, wanted, name)
        stand_ins = [stand_in for lookup in lookups for stand_in in lookup.asked]
        return list(zip(stand_ins, [t for asked in found for t in asked], strict=True))

    def _exchange_rows(self, kind: str, late: list[_Late]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns the stand-ins for the rows that are received, and their values."""
        if not late:
            return []
        received = exchange_rows(
            self._collective,
            [each.rows for each in late],
            [each.counts for each in late],
            [each.received_counts for each in late],
            self._extended.unique_name(kind),
            codec=self._codec,
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
    """Context manager: the exchanges of all lookups in a step's graph are made on exit.

    Eagerly, and where operations must run in the order in which they were made, each lookup has
    exchanges of its own.
    """
    collective = extended.collective.in_any_order
    if tf.executing_eagerly() or collective is None:
        yield
        return
    extended.late_exchanges = LateExchanges(extended, collective)
    try:
        yield
        extended.late_exchanges.make()
    finally:
        extended.late_exchanges = None


def exchanges_of(extended: ReplicaExtended) -> Exchanges:
    """Returns the exchanges of the step whose graph is traced; elsewhere they are made at once."""
    late = extended.late_exchanges
    is_late = late is not None and late.graph is tf.compat.v1.get_default_graph()
    return late if is_late else Exchanges(extended)
