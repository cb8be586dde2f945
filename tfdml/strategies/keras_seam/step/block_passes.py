"""The two passes of a block: the second one gets what the first one took from Keras's state.

Between the two passes of a block, Keras's own state goes on: random generators are advanced,
statistics are moved, the call in which layers look up `training` ends. So the first pass notes
what it took from that state, and the second one gets the same:

| state | in the second pass |
|---|---|
| seeds drawn from a `SeedGenerator` | the same seeds, in the same order |
| variables that the block assigns | read as before the block; not assigned again |
| losses added by `add_loss` | outputs of the block: they are added once, with their gradient |
| masks of the inputs; the call's `training`, the dtype of autocasting | as in the first pass |
| a `StatelessScope`, a device, masks that an `RNN` keeps for its cell | as in the first pass |
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.traced import traced

# Keras passes these to layers by its global state, which belongs to the calling thread.
_CONTEXT = ("current_call_ctx", "autocast_scope")
# An `RNN` draws these before its loop, keeps them in the cell, and drops them after it.
_CELL = ("_dropout_mask", "_recurrent_dropout_mask")


@dataclasses.dataclass
class FirstPass:
    """The first pass of a block: what it draws, changes and adds.

    Attributes:
        graph: The graph in which the block is traced; None if it runs eagerly.
        outer: Second pass of an outer block, within which this one is computed.
        whole: Whether the second pass is computed without smaller blocks.
        seeds: Seeds drawn, in order.
        state: Values by the id of their variable, before the block: of variables that it assigns,
            and those that a `StatelessScope` gives.
        variables: The variables that it assigns.
        losses: Losses added, each with the layer that added it.
    """

    graph: tf.Graph | None
    outer: "SecondPass | None"
    whole: bool = False
    seeds: list[tf.Tensor] = dataclasses.field(default_factory=list)
    state: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    variables: list[keras.Variable] = dataclasses.field(default_factory=list)
    losses: list[tuple[keras.Layer, tf.Tensor]] = dataclasses.field(default_factory=list)

    def seed(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the next seed, and notes it."""
        if current_graph() is not self.graph:
            raise ValueError(
                "A block of `remat` must draw its random numbers outside of loops and branches of "
                "the graph, because the seeds of all iterations are needed again for the gradient. "
                "Received: a seed drawn in `tf.while_loop`, `tf.cond`, `keras.ops.scan`, an `RNN` "
                "with a cell that contains `Dropout`, or a `tf.function`. Leave that layer out of "
                "the block, draw the numbers before the loop, or use `unroll=True`."
            )
        seed = draw() if self.outer is None else self.outer.seed(draw)
        self.seeds.append(seed)
        return seed

    def change(self, variable: keras.Variable) -> None:
        """Notes a variable's value before its first assignment."""
        if id(variable) not in self.state:
            inside = contextlib.nullcontext() if self.graph is None else self.graph.as_default()
            with inside:
                self.state[id(variable)] = tf.identity(variable._value)
            self.variables.append(variable)

    def add_loss(self, layer: keras.Layer, loss: tf.Tensor) -> None:
        """Notes a loss, which is added when the block ends."""
        self.losses.append((layer, loss))


class SecondPass:
    """The second pass of a block, which gets what the first one has noted.

    Args:
        first: The first pass.
        name: Name of the block, for error messages.

    Attributes:
        losses: Losses added, in the order of the first pass.
        whole: As of the first pass.
    """

    def __init__(self, first: FirstPass, name: str):
        self.losses: list[tf.Tensor] = []
        self.whole = first.whole
        self._first, self._name, self._drawn = first, name, 0

    def seed(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the next seed of the first pass."""
        self._drawn += 1
        if self._drawn > len(self._first.seeds):
            raise self._differs("seeds", f"at least {self._drawn}", len(self._first.seeds))
        return self._first.seeds[self._drawn - 1]

    def change(self, variable: keras.Variable) -> None:
        """Does nothing: in a `StatelessScope`, no variable is assigned."""

    def add_loss(self, layer: keras.Layer, loss: tf.Tensor) -> None:
        """Notes a loss, to compute its gradient."""
        self.losses.append(loss)

    def check(self, outputs: int, expected: int) -> None:
        """Checks that the pass has done what the first one did.

        Args:
            outputs: Number of its outputs.
            expected: That of the first pass.

        Raises:
            ValueError: If it has not.
        """
        for what, own, first in (
            ("outputs", outputs, expected),
            ("seeds", self._drawn, len(self._first.seeds)),
            ("added losses", len(self.losses), len(self._first.losses)),
        ):
            if own != first:
                raise self._differs(what, own, first)

    def _differs(self, what: str, own: Any, first: int) -> ValueError:
        return ValueError(
            f"A block of `remat` must do the same when it is computed again for its gradient. "
            f"Received: {self._name!r} with {first} {what} at first, and {own} the second time. "
            f"Keep what its code depends on the same until the gradient is taken."
        )


class KerasContext:
    """State that Keras passes to layers by its context, as it is when a block is called.

    Args:
        function: The block's function.
    """

    def __init__(self, function: Callable):
        self._values = {name: global_state.get_global_attribute(name) for name in _CONTEXT}
        # Layers that are called later in the same call may change it.
        self._values["current_call_ctx"] = copy.copy(self._values["current_call_ctx"])
        self._cells = [(cell, _kept_masks(cell)) for cell in _cells(function)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context manager: Keras passes the same."""
        with contextlib.ExitStack() as state:
            state.enter_context(_in_context(self._values))
            for cell, kept in self._cells:
                state.enter_context(_with_masks(cell, kept))
            yield


def current_graph() -> tf.Graph | None:
    """Returns the graph that is being traced; None if operations run."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def current_pass() -> FirstPass | SecondPass | None:
    """Returns the pass of the innermost block that is being computed, else None.

    What Keras runs only to find shapes belongs to no block.
    """
    return None if in_symbolic_scope() else traced().block


def note_change(variable: keras.Variable) -> None:
    """Notes the value of a variable that is assigned next, if that is in a block."""
    block = current_pass()
    if block is not None:
        block.change(variable)


def check_tape() -> None:
    """Refuses a gradient where nothing is recorded: in the first pass of a block, eagerly.

    Raises:
        ValueError: If the caller is there.
    """
    if isinstance(traced().block, FirstPass) and tf.executing_eagerly():
        raise ValueError(
            "A block of `remat` must not take gradients by a tape of its own while it runs "
            "eagerly, because TensorFlow records nothing there. Received: `GradientTape.gradient` "
            "in a block. Use a `tf.function`, or leave out `run_eagerly=True`."
        )


@contextlib.contextmanager
def _in_context(context: dict[str, Any]) -> Iterator[None]:
    """Context manager: Keras's global state has these values."""
    before = {name: global_state.get_global_attribute(name) for name in context}
    try:
        for name, value in context.items():
            global_state.set_global_attribute(name, value)
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def _cells(function: Callable) -> list[DropoutRNNCell]:
    """Returns the cells in the layer whose method a function is."""
    layer = getattr(function, "__self__", None)
    layers = layer._flatten_layers() if isinstance(layer, keras.Layer) else ()
    return [layer for layer in layers if isinstance(layer, DropoutRNNCell)]


def _kept_masks(cell: DropoutRNNCell) -> dict[str, Any]:
    return {name: getattr(cell, name, None) for name in _CELL}


@contextlib.contextmanager
def _with_masks(cell: DropoutRNNCell, kept: dict[str, Any]) -> Iterator[None]:
    """Context manager: a cell has these masks."""
    before = _kept_masks(cell)
    try:
        for name, value in kept.items():
            setattr(cell, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(cell, name, value)


def _add_loss(original: Callable) -> Callable:
    """Leaves a loss added in a block to the block, which gives it a gradient."""

    def add_loss(self, loss):
        block = current_pass()
        if block is None:
            return original(self, loss)
        for value in keras.tree.flatten(loss):
            if not keras.ops.is_tensor(value):
                return original(self, value)  # Raises.
            block.add_loss(self, value)

    return add_loss


REPLACEMENTS: list[Replacement] = [(keras.layers.Layer, "add_loss", _add_loss)]
