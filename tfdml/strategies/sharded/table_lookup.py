"""Lookups in tables that are dealt to the ranks: ids to the rows' owners, rows back."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdml.collectives.row_deal import RowDeal
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.sharded.late_exchanges import Lookup, exchanges_of
from tfdml.strategies.sharded.table_exchange import wanted_rows


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
        exchanges_of(extended).ask(lookup)
        own = _on_devices(extended, lookup.asked.rows, len(flat))
        return [(lookup, *pair) for pair in zip(own, lookup.wanted.places, strict=True)]

    lookup, own, places = _of_all(extended, ask, tf.reshape(ids, [-1]))

    @tf.custom_gradient
    def to_askers(rows: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def send(copies: list[tf.Tensor]) -> list[tf.Tensor]:
            # All replicas have read the same rows.
            received = exchanges_of(extended).send_rows(lookup, copies[0])
            return _on_devices(extended, received, len(copies))

        def send_back(upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            own = exchanges_of(extended).send_gradients(lookup, tf.add_n(upstream))
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
