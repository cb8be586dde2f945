"""Update of an optimizer whose state is divided: each rank updates its parts, then all gather."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.cut import Cut
from tfdml.collectives.part_exchange import gather_parts, own_rows
from tfdml.collectives.sparse_gradients import values_of
from tfdml.optimizers.norms import ROW
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.sharded.variable_parts import (
    Ownership,
    cuts_for,
    is_cut,
    is_dealt,
    make_part,
    ownership_of,
)


class OptimizerParts:
    """This rank's parts of one optimizer's variables.

    Attributes:
        wholes: The whole variables.
        variables: The parts, and those variables that all ranks update.

    Args:
        extended: The strategy's extended part.
        optimizer: The optimizer, without a loss scale around it.
        variables: The whole variables.
    """

    def __init__(
        self,
        extended: ReplicaExtended,
        optimizer: keras.Optimizer,
        variables: Sequence[keras.Variable],
    ):
        collective = extended.collective
        self._extended = extended
        cuts = cuts_for(optimizer, variables, collective.size)
        self.variables = [
            variable if cut is None else make_part(variable, cut, collective.rank)
            for variable, cut in zip(variables, cuts, strict=True)
        ]
        self.wholes = list(variables)
        self._by_whole = {id(v): part for v, part in zip(variables, self.variables, strict=True)}

    def of(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        """Returns the parts of whole variables; those that all ranks update themselves."""
        return [self._by_whole.get(id(v), v) for v in variables]

    def cuts(self, variables: Sequence[keras.Variable]) -> list[Cut | None]:
        """Returns the divisions of whole variables, None for those that all ranks update."""
        return [part.ownership.cut if is_cut(part) else None for part in self.of(variables)]

    def check_all_update(self, variables: Sequence[keras.Variable]) -> None:
        """Checks that no rank is left without an update, which would not count the iteration.

        Args:
            variables: The whole variables that have a gradient.

        Raises:
            ValueError: On all ranks, if one of them owns none of these variables.
        """
        cuts = self.cuts(variables)
        if not cuts or None in cuts:
            return
        idle = [rank for rank in range(cuts[0].ranks) if not any(cut.rows(rank) for cut in cuts)]
        if idle:
            names = ", ".join(v.path for v in variables)
            raise ValueError(
                f"With `sharding`, every rank must own a part of the variables of an update. "
                f"Received: an update of {names}, of which rank {', '.join(map(str, idle))} owns "
                f"nothing. Use an optimizer for these variables alone, built on them."
            )

    def parts_of(self, gradients: Sequence, variables: Sequence[keras.Variable]) -> list:
        """Returns this rank's parts of gradients that are the same on all ranks.

        Args:
            gradients: Dense or sparse gradients, or None.
            variables: Their variables, whole.
        """
        return [
            gradient if gradient is None or not is_cut(part) else _part_of(gradient, part.ownership)
            for gradient, part in zip(gradients, self.of(variables), strict=True)
        ]

    def refresh(self, parts: Sequence[keras.Variable]) -> None:
        """Copies the weights into the parts that have memory of their own; in replica context."""
        copied = [p for p in parts if is_cut(p) and p.ownership.is_partial]

        def merge(strategy: tf.distribute.Strategy) -> None:
            for part in copied:
                ownership = part.ownership
                strategy.extended.update(
                    part.value,
                    lambda own, whole, ownership=ownership: own.assign(
                        ownership.cut.part_of(tf.convert_to_tensor(whole), ownership.rank)
                    ),
                    (ownership.whole.value,),
                )

        tf.distribute.get_replica_context().merge_call(merge)

    def gather(self, parts: Sequence[keras.Variable], label: str) -> None:
        """Gives the whole variables the new values of all ranks' parts; in replica context.

        Args:
            parts: Parts and whole variables that have been updated.
            label: Name of the exchange.
        """
        divided = [part for part in parts if is_cut(part)]

        def merge(strategy: tf.distribute.Strategy) -> None:
            extended = strategy.extended
            with tf.device(extended.local_devices[0]):
                own = [_first_copy(part) for part in divided]
                wholes = gather_parts(
                    extended.collective,
                    own,
                    [part.ownership.cut for part in divided],
                    label,
                    extended.options.bucket_bytes,
                )
            for part, value in zip(divided, wholes, strict=True):
                extended.update(
                    part.ownership.whole.value,
                    lambda whole, new: whole.assign(new),
                    (extended.on_all_devices(value),),
                )

        if divided:
            tf.distribute.get_replica_context().merge_call(merge)


def gather_row_norms(
    extended: ReplicaExtended,
    variables: Sequence[keras.Variable],
    index: int,
    own: list[tf.Tensor],
) -> list[tf.Tensor] | None:
    """Returns norms of which a whole variable's norms are made; None if it is not divided.

    Called in the update of a variable; see `LayerwiseOptimizer`.

    Args:
        extended: The strategy's extended part.
        variables: The optimizer's variables, or this rank's parts of them.
        index: The variable's index.
        own: Norms of the rows of this rank's part, for several tensors of its shape.
    """
    ownership, collective = ownership_of(variables[index]), extended.collective
    if ownership is None:
        return None
    name = extended.unique_name("row_norms")
    if is_dealt(variables[index]):
        # No rank has neighbouring rows of the whole, so only the sum of all squares is known.
        squares = tf.stack([tf.reduce_sum(tf.square(norms)) for norms in own])
        (total,) = collective.all_reduce([squares], name)
        return tf.split(tf.sqrt(total), len(own))
    rows = [-(-size // ROW) for size in ownership.cut.sizes]
    gathered = collective.all_gather_rows(
        tf.concat(own, 0), [len(own) * number for number in rows], name
    )
    # By rank, then by tensor.
    pieces = tf.split(gathered, [number for number in rows for _ in own])
    return [tf.concat(pieces[i :: len(own)], 0) for i in range(len(own))]


def squared_norm(gradients: Sequence, parts: Sequence[keras.Variable]) -> tf.Tensor:
    """Returns the squared norm of all variables' whole gradients; in replica context.

    Args:
        gradients: Gradients of this rank's parts, or None.
        parts: The parts, and the variables that all ranks update.
    """
    dtype = _wide_dtype(parts)
    own_total = common_total = tf.zeros((), dtype)
    for gradient, part in zip(gradients, parts, strict=True):
        if gradient is not None and ownership_of(part) is None:
            common_total += _squares(gradient, dtype)
        elif gradient is not None:
            own_total += _squares(gradient, dtype)
    return _summed_over_ranks([own_total])[0] + common_total


def squared_norms_of_tables(
    gradients: Sequence, tables: Sequence[keras.Variable]
) -> list[tf.Tensor]:
    """Returns the squared norm of each table's whole gradient; in replica context.

    Args:
        gradients: Gradients of this rank's rows.
        tables: Tables that are dealt to the ranks.
    """
    dtype = _wide_dtype(tables)
    return _summed_over_ranks([_squares(gradient, dtype) for gradient in gradients])


def _summed_over_ranks(own: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums over all ranks of scalars of one dtype."""

    def merge(strategy: tf.distribute.Strategy, per_replica: Any) -> Any:
        extended: ReplicaExtended = strategy.extended
        collective: Collective = extended.collective
        here = extended.parts_of(per_replica)[0]
        name = extended.unique_name("sharded_norm")
        return extended.on_all_devices(collective.all_reduce([here], name)[0])

    totals = tf.distribute.get_replica_context().merge_call(merge, args=(tf.stack(own),))
    return tf.unstack(totals, len(own))


def _part_of(gradient: Any, ownership: Ownership) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return own_rows(gradient, ownership.cut, ownership.rank)
    return ownership.cut.part_of(gradient, ownership.rank)


def _first_copy(part: keras.Variable) -> tf.Tensor:
    return tf.convert_to_tensor(getattr(part.value, "values", [part.value])[0])


def _wide_dtype(variables: Sequence[keras.Variable]) -> tf.DType:
    return tf.float64 if any(v.dtype == "float64" for v in variables) else tf.float32


def _squares(gradient: Any, dtype: tf.DType) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(values_of(gradient), dtype)))
