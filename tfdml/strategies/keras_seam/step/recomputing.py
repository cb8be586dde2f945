"""Gradient checkpointing: a block keeps its inputs, and is computed again for its gradient.

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

The gradient of the block is `tf.custom_gradient`'s. Its inputs are all tensors of floats in the
arguments, those that the function takes from elsewhere, and the values of variables.

Reference:
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.tensorflow import core
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.tensorflow_seam import (
    is_in_control_flow,
    is_recorded,
    unrecorded,
    watching_variables,
)
from tfdml.strategies.traced import traced, tracing

# Keras passes these to layers by its global state, which belongs to the calling thread.
_CONTEXT = ("current_call_ctx", "autocast_scope")
# An `RNN` draws these before its loop, keeps them in the cell, and drops them after it.
_CELL = ("_dropout_mask", "_recurrent_dropout_mask")
# Operations of `tf.random`, which keep their state in TensorFlow.
_RANDOM = re.compile(r"Random|Multinomial|TruncatedNormal|^Rng|^Stateful(Uniform|StandardNormal)")


@dataclasses.dataclass
class FirstPass:
    """The first pass of a block: what it draws, changes and adds.

    Attributes:
        graph: The graph in which the block is traced; None if it runs eagerly.
        outer: Second pass of an outer block, within which this one is computed.
        seeds: Seeds drawn, in order.
        state: Values by the id of their variable, before the block: of variables that it assigns,
            and those that a `StatelessScope` gives.
        variables: The variables that it assigns.
        losses: Losses added, each with the layer that added it.
    """

    graph: tf.Graph | None
    outer: "SecondPass | None"
    seeds: list[tf.Tensor] = dataclasses.field(default_factory=list)
    state: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    variables: list[keras.Variable] = dataclasses.field(default_factory=list)
    losses: list[tuple[keras.Layer, tf.Tensor]] = dataclasses.field(default_factory=list)

    def seed(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the next seed, and notes it."""
        if _current_graph() is not self.graph:
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
    """

    def __init__(self, first: FirstPass, name: str):
        self.losses: list[tf.Tensor] = []
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


def recomputed(function: Callable) -> Callable:
    """Returns a function that computes the same as a block: for its gradient it runs again.

    Args:
        function: A function or a layer. Arguments and results are structures of tensors and
            anything else.
    """

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        outside = any_symbolic_tensors(args, kwargs) or in_symbolic_scope()
        if outside or not _is_a_block(function):
            return function(*args, **kwargs)
        return _Block(function, args, kwargs).outputs()

    return call


def _is_a_block(function: Callable) -> bool:
    """Returns whether there is a gradient to be taken, for which recomputing saves memory."""
    if isinstance(traced().block, FirstPass):
        return False  # What it computes is not kept anyhow.
    if is_in_control_flow():
        return False  # TensorFlow cannot read variables in the gradient of a loop or a branch.
    # Nothing is gained from computing the whole model again, as `RematScope("full")` would.
    model = getattr(function, "__self__", None)
    call = global_state.get_global_attribute("current_call_ctx")
    if isinstance(model, keras.Model) and call is not None and call.entry_layer is model:
        return False
    return is_recorded() or not tf.executing_eagerly()


class _Block:
    """A call of a function whose results are computed again for their gradient.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict):
        self._function = function
        self._name = getattr(function, "__qualname__", None) or getattr(function, "name", "block")
        self._arguments = (args, kwargs)
        self._inputs = _floats(self._arguments)
        self._context = {name: global_state.get_global_attribute(name) for name in _CONTEXT}
        # Layers that are called later in the same call may change it.
        self._context["current_call_ctx"] = copy.copy(self._context["current_call_ctx"])
        self._cells = [(cell, _kept_masks(cell)) for cell in _cells(function)]
        # In a graph, gradients are placed where they are taken, which may be another device.
        device = "" if tf.executing_eagerly() else tf.constant(0.0).device
        self._on_device = functools.partial(tf.device, device) if device else contextlib.nullcontext
        self._first = FirstPass(_current_graph(), traced().block)
        scope = get_stateless_scope()
        if scope is not None:
            self._first.state.update(scope.state_mapping)

    def outputs(self) -> Any:
        """Computes the block, and returns the function's results."""
        results, captured, variables = self._first_pass()
        values = _floats(results)
        losses = [loss for _, loss in self._first.losses]
        if not values and not losses:
            return results
        count = len(values)
        inputs = [*self._inputs, *captured, *map(tf.convert_to_tensor, variables)]

        @tf.custom_gradient
        def block(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
            # Without a reference to what the first pass has computed.
            gradient = functools.partial(self._gradient, captured, variables, count)
            return [*values, *losses], lambda *upstream: gradient(upstream)

        computed = block(*inputs)
        masks = map(get_keras_mask, values)
        for value, mask in zip(computed, masks, strict=False):
            if mask is not None:
                set_keras_mask(value, mask)
        for (layer, _), loss in zip(self._first.losses, computed[count:], strict=True):
            layer.add_loss(loss)
        return _replaced(results, computed[:count])

    def _first_pass(self) -> tuple[Any, list[tf.Tensor], list[tf.Variable]]:
        """Computes the block.

        Returns:
            The function's results; tensors of floats that it takes from elsewhere; the trainable
            variables that it reads.
        """
        (args, kwargs), graph = self._arguments, self._first.graph
        before = 0 if graph is None else len(graph.get_operations())
        # A graph keeps what the block computes only if something needs it, such as a loss of
        # attention scores that a layer has stored: their gradient is the tape's.
        quiet = unrecorded() if graph is None else contextlib.nullcontext()
        with tracing(block=self._first, takes_gradient=True), quiet, watching_variables() as seen:
            results = self._function(*args, **kwargs)
        if graph is None:
            scope = get_stateless_scope()
            found = [] if scope is None else list(scope.state_mapping.values())
            found += _closure(self._function)
        else:
            operations = graph.get_operations()[before:]
            _refuse_random(operations, self._name)
            found = _taken_from_elsewhere(operations)
        captured = {id(t): t for t in found if _is_differentiable(t)}
        for tensor in self._inputs:
            captured.pop(id(tensor), None)
        variables = [v for v in seen.watched_variables() if v.dtype.is_floating]
        # TensorFlow returns them in any order.
        return results, list(captured.values()), sorted(variables, key=lambda v: v.name)

    def _second_pass(self, inputs: Sequence[tf.Tensor], count: int) -> list[tf.Tensor]:
        """Computes the block again.

        Args:
            inputs: The tensors of floats in the arguments.
            count: Number of the first pass's outputs.

        Returns:
            The outputs, then the losses.
        """
        args, kwargs = _replaced(self._arguments, inputs)
        second = SecondPass(self._first, self._name)
        scope = keras.StatelessScope(initialize_variables=False)
        scope.state_mapping.update(self._first.state)
        with contextlib.ExitStack() as state:
            state.enter_context(tracing(block=second))
            state.enter_context(_in_context(self._context))
            for cell, kept in self._cells:
                state.enter_context(_with_masks(cell, kept))
            state.enter_context(scope)
            results = self._function(*args, **kwargs)
        outputs = _floats(results)
        second.check(len(outputs), count)
        return [*outputs, *second.losses]

    def _gradient(
        self,
        captured: list[tf.Tensor],
        variables: list[tf.Variable],
        count: int,
        upstream: Sequence[tf.Tensor],
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of all inputs of the block, from those of its outputs."""
        upstream = [tf.convert_to_tensor(gradient) for gradient in upstream]
        with tracing(takes_gradient=True), self._on_device():
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                inputs = _after(upstream, self._inputs)
                for tensor, given in zip(inputs, self._inputs, strict=True):
                    if get_keras_mask(given) is not None:
                        set_keras_mask(tensor, get_keras_mask(given))
                tape.watch([*inputs, *captured, *variables])
                outputs = self._second_pass(inputs, count)
            sources = [*inputs, *captured, *variables]
            return tape.gradient(outputs, sources, output_gradients=upstream)


def _after(upstream: list[tf.Tensor], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the same tensors, but not before `upstream` has been computed.

    Else the second pass would run right after the first one, or be taken for the same. The tensors
    depend on a number of `upstream`: XLA does not know control dependencies, and Grappler of
    TensorFlow 2.21 then lets variables be read after their update.
    """
    if tf.executing_eagerly():
        return [tf.identity(tensor) for tensor in tensors]
    known = tf.reduce_any(tf.cast(tf.reshape(upstream[0], [-1])[:1], tf.bool))
    # 0, whatever the number is, but only at run time.
    zero = tf.where(tf.equal(known, known), 0.0, float("nan"))
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Maps the leaves of a structure; ragged and sparse tensors are structures, too."""

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
            return tf.nest.map_structure(function, leaf, expand_composites=True)
        return function(leaf)

    return tf.nest.map_structure(map_leaf, structure)


def _floats(structure: Any) -> list[tf.Tensor]:
    """Returns the tensors of floats in a structure."""
    found: list[Any] = []
    _mapped(found.append, structure)
    return [leaf for leaf in found if _is_differentiable(leaf)]


def _replaced(structure: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Returns a structure with other tensors of floats, in the order of `_floats`."""
    remaining = iter(tensors)
    return _mapped(lambda leaf: next(remaining) if _is_differentiable(leaf) else leaf, structure)


def _current_graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _taken_from_elsewhere(operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """Returns the inputs of operations that are not computed by one of them.

    A graph that reads a small tensor from outside has a constant of it.
    """
    own = {o.name for o in operations if o.type not in ("Placeholder", "Const")}
    inputs = [tensor for operation in operations for tensor in operation.inputs]
    return [tensor for tensor in inputs if tensor.op.name not in own]


def _closure(function: Callable) -> list[Any]:
    """Returns what a function that runs eagerly takes from the function around it."""
    if isinstance(function, functools.partial):
        return [*_floats((function.args, function.keywords)), *_closure(function.func)]
    cells = getattr(function, "__closure__", None) or ()
    return _floats([cell.cell_contents for cell in cells])


def _refuse_random(operations: Sequence[tf.Operation], name: str) -> None:
    for operation in operations:
        if operation.op_def.is_stateful and _RANDOM.search(operation.type):
            raise ValueError(
                f"A block of `remat` must draw random numbers by `keras.random`, because those of "
                f"`tf.random` would be others when it is computed again for its gradient. "
                f"Received: {name!r} with the operation {operation.name!r} of type "
                f"{operation.type}. Use `keras.random` with a `SeedGenerator`."
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


def _remat(original: Callable) -> Callable:
    """Replaces what `keras.remat` and `RematScope` call, which is `tf.recompute_grad`."""

    def remat(f):
        return recomputed(f)

    return remat


def _rematerialized_call(original: Callable) -> Callable:
    """Mends two modes of `RematScope`, which crash with some layers."""

    def spec(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or value.shape.rank is None:
            return value
        return keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))

    def rematerialized_call(self, layer_call, *args, **kwargs):
        mode = self._remat_mode.mode if self._remat_mode is not None else None
        if mode == "larger_than":
            # Only the shapes are needed; merging layers refuse tensors here.
            args, kwargs = keras.tree.map_structure(spec, (args, kwargs))
        if mode == "activations" and isinstance(getattr(type(self), "activation", None), property):
            return layer_call  # A recurrent layer's activation is its cell's.
        return original(self, layer_call, *args, **kwargs)

    return rematerialized_call


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


REPLACEMENTS: list[Replacement] = [
    (core, "remat", _remat),
    (keras.layers.Layer, "rematerialized_call", _rematerialized_call),
    (keras.layers.Layer, "add_loss", _add_loss),
]
