"""Embedding tables that `Sharding(embeddings=True)` divides, with the rows that a rank has."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdml.collectives.row_deal import RowDeal
from tfdml.memory.step_graph import OptimizerUpdate
from tfdml.strategies.sharded.large_tables import is_large, needs_of_whole_table
from tfdml.strategies.sharded.variable_parts import check_optimizer_of_tables, is_dealt


@dataclasses.dataclass(frozen=True)
class LargeTables:
    """The large embedding tables of a model.

    Attributes:
        layers: The layers that have the tables.
    """

    layers: tuple[keras.layers.Embedding, ...] = ()

    @classmethod
    def of(cls, model: keras.Model, least: int) -> "LargeTables":
        """Returns the tables of at least so many bytes, and those that the job divides already.

        Args:
            model: A built model.
            least: Bytes of a table from which on it is divided.
        """
        return cls(tuple(f for f in model._flatten_layers() if _is_divided(f, least)))

    def has(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is one of the tables."""
        return any(variable is layer._embeddings for layer in self.layers)

    @contextlib.contextmanager
    def in_parts(self, ranks: int) -> Iterator[None]:
        """Context manager: the tables have the rows of rank 0, which has the most.

        It is for the trace of a step: the variables that it puts in the place of the tables are
        created in the graph, and never get values.

        Args:
            ranks: The number of ranks; 1 for whole tables.
        """
        with contextlib.ExitStack() as restored:
            for layer in self.layers:
                shape = _deal(layer, ranks).part_shape(0)
                restored.enter_context(_in_place_of(layer._embeddings, shape))
            yield

    def obstacle(self, updates: Sequence[OptimizerUpdate]) -> str | None:
        """Returns a sentence on why the tables cannot be divided; None if they can.

        Args:
            updates: The updates of the step.
        """
        for layer in self.layers:
            needs = needs_of_whole_table(layer)
            if needs:
                return (
                    f"The layer {layer.name!r} has `{next(iter(needs))}`, which works on the whole "
                    f"table in every step."
                )
        for update in updates:
            pairs = zip(update.gradients, update.variables, strict=True)
            gradients = [g for g, variable in pairs if self.has(variable)]
            if any(isinstance(gradient, tf.Tensor) for gradient in gradients):
                return (
                    "The step reads a table as a whole, as an output layer with its weights does."
                )
            if gradients:
                inner = getattr(update.optimizer, "inner_optimizer", update.optimizer)
                try:
                    check_optimizer_of_tables(inner)
                except ValueError as error:
                    return str(error)
        return None


def _is_divided(layer: keras.Layer, least: int) -> bool:
    table = getattr(layer, "_embeddings", None)
    if not isinstance(layer, keras.layers.Embedding) or table is None:
        return False
    return is_dealt(table) or is_large(layer, least)


def _deal(layer: keras.layers.Embedding, ranks: int) -> RowDeal:
    return RowDeal((layer.input_dim, layer.output_dim), ranks)


@contextlib.contextmanager
def _in_place_of(table: keras.Variable, shape: tuple[int, ...]) -> Iterator[None]:
    """Context manager: a table has another shape, and no values."""
    before = table._value, table._shape
    ownership = vars(table).pop("ownership", None)
    table._value = tf.Variable(lambda: tf.zeros(shape, table.dtype), name=table.name)
    table._shape = shape
    # Optimizers identify a variable by this id, in several traces.
    table._value._unique_id = before[0]._unique_id
    try:
        yield
    finally:
        table._value, table._shape = before
        if ownership is not None:
            table.ownership = ownership
