"""Parts of variables as an optimizer sees them, and the slots that belong to them."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.cut import Cut, cut_in_rows, own_whole
from tfdml.collectives.row_deal import RowDeal
from tfdml.optimizers import LAMB, LARS, LazyAdam, RowWiseAdagrad
from tfdml.optimizers.norms import FEW, ROW

# These compute each number of a variable on its own, so they may be given any numbers of it.
_BY_NUMBERS = frozenset(
    {
        keras.optimizers.SGD,
        keras.optimizers.Adam,
        keras.optimizers.AdamW,
        keras.optimizers.Adagrad,
        keras.optimizers.Adadelta,
        keras.optimizers.Adamax,
        keras.optimizers.Nadam,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
        keras.optimizers.RMSprop,
    }
)
# These work on rows of a matrix, which must not be cut within a row.
_BY_ROWS = frozenset({LazyAdam, RowWiseAdagrad})
# These need norms of a variable, too, which they compute from norms of rows of its numbers. A
# variable of few numbers has none, and stays whole on all ranks.
_BY_NUMBERS_WITH_NORMS = frozenset({LARS, LAMB})


@dataclasses.dataclass(frozen=True)
class Ownership:
    """Division of a variable that this rank has a part of.

    It is the attribute `ownership` of the part, and of the part's slots.

    Attributes:
        whole: The whole variable; None for a table that no rank has as a whole.
        cut: The division of its rows among the ranks.
        rank: The rank that this process has.
    """

    whole: keras.Variable | None
    cut: Cut | RowDeal
    rank: int

    @property
    def is_whole(self) -> bool:
        """Whether this rank owns the whole variable."""
        return self.cut.owner == self.rank

    @property
    def is_empty(self) -> bool:
        """Whether this rank owns nothing of it."""
        return self.cut.rows(self.rank) == 0

    @property
    def is_partial(self) -> bool:
        """Whether this rank owns some of its rows, which have memory of their own."""
        return not (self.is_whole or self.is_empty)

    def of_slot(self, shape: Sequence[int]) -> "Ownership":
        """Returns the division of a slot of the part, given the shape that it has on this rank."""
        if self.cut.owner is not None or tuple(shape) == self.cut.part_shape(self.rank):
            return self
        return dataclasses.replace(self, cut=self.cut.of_rows())


def ownership_of(variable: Any) -> Ownership | None:
    """Returns the `ownership` of a part or of its slot; None for a variable of all ranks."""
    return getattr(variable, "ownership", None)


def is_empty(variable: Any) -> bool:
    """Returns whether a variable is a part of which this rank owns nothing."""
    ownership = ownership_of(variable)
    return ownership is not None and ownership.is_empty


def is_dealt(variable: Any) -> bool:
    """Returns whether a variable is a table of which each rank has its own rows alone."""
    ownership = ownership_of(variable)
    return ownership is not None and ownership.whole is None


def is_cut(variable: Any) -> bool:
    """Returns whether a variable is a part of a variable that all ranks have as a whole."""
    ownership = ownership_of(variable)
    return ownership is not None and ownership.whole is not None


def cuts_for(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable], ranks: int
) -> list[Cut | None]:
    """Returns how an optimizer's variables are divided; None for those that all ranks update.

    Args:
        optimizer: The optimizer, without a loss scale around it.
        variables: The whole variables, and tables dealt to the ranks.
        ranks: The number of ranks.
    """
    kind = type(optimizer)
    can_cut = kind in _BY_NUMBERS | _BY_ROWS | _BY_NUMBERS_WITH_NORMS and not optimizer.clipnorm
    cuts: list[Cut | None] = [None] * len(variables)
    needs_whole = []
    for index, variable in enumerate(variables):
        if getattr(variable, "overwrite_with_gradient", False) or is_dealt(variable):
            continue
        cuts_rows = kind in _BY_ROWS and _cuts_rows(variable.shape, ranks)
        if not can_cut or cuts_rows or variable.constraint is not None:
            needs_whole.append(index)
        elif kind not in _BY_NUMBERS_WITH_NORMS:
            cuts[index] = cut_in_rows(variable.shape, ranks)
        elif math.prod(variable.shape) > FEW:
            cuts[index] = cut_in_rows(variable.shape, ranks, ROW)
    owned = own_whole([variables[i].shape for i in needs_whole], ranks)
    for index, cut in zip(needs_whole, owned, strict=True):
        cuts[index] = cut
    return cuts


def check_optimizer_of_tables(optimizer: keras.Optimizer) -> None:
    """Checks that an optimizer may train tables that are dealt to the ranks.

    Args:
        optimizer: The optimizer, without a loss scale around it.

    Raises:
        ValueError: If it may need more of a table than this rank's rows.
    """
    known = _BY_NUMBERS | _BY_ROWS | _BY_NUMBERS_WITH_NORMS
    if type(optimizer) not in known:
        names = ", ".join(sorted(kind.__name__ for kind in known))
        raise ValueError(
            f"`optimizer` must need no more of a table than its own rows and norms with "
            f"`Sharding(embeddings=True)`, as "
            f"{names} do. Received: {type(optimizer).__name__}, which may need whole tables. "
            f"Use one of those, or leave out `embeddings`."
        )


def _cuts_rows(shape: Sequence[int], ranks: int) -> bool:
    """Returns whether a matrix has too few rows to be cut between them."""
    cut = cut_in_rows(shape, ranks)
    return cut is not None and len(shape) == 2 and not cut.row_shape


def make_part(whole: keras.Variable, cut: Cut, rank: int) -> keras.Variable:
    """Returns this rank's part of a variable; the optimizer knows it as the whole one.

    A part of some rows has memory of its own, and gets its value before each update. The part that
    is the whole variable shares the variable's memory.

    Args:
        whole: The whole variable.
        cut: Its division among the ranks.
        rank: The rank of this process.
    """
    part = copy.copy(whole)
    part.ownership = Ownership(whole, cut, rank)
    if part.ownership.is_whole:
        return part
    part._shape = cut.part_shape(rank)
    part._value = tf.Variable(
        tf.zeros(part._shape, whole.dtype), trainable=False, name=whole.value.name.split(":")[0]
    )
    # Optimizers identify a variable by this id.
    getattr(part._value, "_primary", part._value)._unique_id = whole.value._unique_id
    return part


class PartList(list):
    """The variables that an optimizer is built on, which mark the slots made for each part.

    An optimizer makes a variable's slots while it iterates over its variables.

    Args:
        variables: Parts and whole variables.
        optimizer: The optimizer.
    """

    def __init__(self, variables: Sequence[keras.Variable], optimizer: keras.Optimizer):
        super().__init__(variables)
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[keras.Variable]:
        """Yields the variables."""
        for variable in super().__iter__():
            before = len(self._optimizer.variables)
            yield variable
            if ownership_of(variable) is not None:
                for slot in self._optimizer.variables[before:]:
                    slot.ownership = variable.ownership.of_slot(slot.shape)


# -- Whole slots -------------------------------------------------------------------------------


def own_numbers(slot: keras.Variable) -> np.ndarray | None:
    """Returns the part of a slot that this rank contributes to the whole one; None for nothing.

    Args:
        slot: A slot with a `ownership`.
    """
    ownership = slot.ownership
    if ownership.is_empty or not (ownership.cut.owner is None or ownership.is_whole):
        return None
    return slot.numpy().reshape(-1)


def part_of_whole(slot: keras.Variable, value: np.ndarray) -> np.ndarray | None:
    """Returns this rank's part of a whole slot's value; None if it owns nothing.

    Args:
        slot: A slot with a `ownership`.
        value: The whole value.
    """
    ownership = slot.ownership
    if ownership.is_empty:
        return None
    return (
        np.asarray(value)
        if ownership.is_whole
        else ownership.cut.part_of(np.asarray(value), ownership.rank)
    )


def join_dealt(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the whole of a table, or of its slot, whose rows were dealt to ranks.

    Args:
        parts: The numbers of each of those ranks.
        shape: The shape of the whole.
    """
    return RowDeal(shape, len(parts)).join(parts)


def whole_shapes(
    variables: Sequence[keras.Variable], collective: Collective
) -> list[tuple[int, ...]]:
    """Returns the shapes that an optimizer's variables have without sharding; all ranks call this.

    Args:
        variables: The optimizer's variables.
        collective: Collective between the ranks.
    """
    axes = max((len(v.shape) for v in variables), default=0)
    table = [[len(v.shape), *v.shape, *[0] * (axes - len(v.shape))] for v in variables]
    own = tf.constant(table, tf.int64, shape=(len(variables), axes + 1))
    by_rank = collective.all_gather(own[tf.newaxis], "divided_slots/shapes").numpy()
    shapes = []
    for index, variable in enumerate(variables):
        ownership = ownership_of(variable)
        if ownership is not None and ownership.cut.owner is None:
            shapes.append(ownership.cut.shape)
        else:
            rank = 0 if ownership is None else ownership.cut.owner
            number, *shape = by_rank[rank, index].tolist()
            shapes.append(tuple(shape[:number]))
    return shapes


def whole_value(slot: keras.Variable, collective: Collective) -> np.ndarray:
    """Returns the numbers of a whole slot, flat; all ranks call this.

    Args:
        slot: A slot with a `ownership`.
        collective: Collective between the ranks.
    """
    own = own_numbers(slot)
    own = np.zeros(0, slot.numpy().dtype) if own is None else own
    return collective.all_gather(tf.constant(own), "divided_slots/values").numpy()
