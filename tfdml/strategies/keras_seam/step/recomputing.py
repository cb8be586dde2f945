"""Gradient checkpointing: a block keeps its inputs, and is computed again for its gradient.

The gradient of the block is `tf.custom_gradient`'s. Its inputs are all tensors of floats in the
arguments, those that the function takes from elsewhere, and the values of variables. What the
second pass gets from the first one is in `block_passes`.

Reference:
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.tensorflow import core

from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.block_passes import (
    FirstPass,
    KerasContext,
    SecondPass,
    current_graph,
)
from tfdml.strategies.tensorflow_seam import (
    is_in_control_flow,
    is_recorded,
    unrecorded,
    watching_variables,
)
from tfdml.strategies.traced import traced, tracing

# Operations of `tf.random`, which keep their state in TensorFlow.
_RANDOM = re.compile(r"Random|Multinomial|TruncatedNormal|^Rng|^Stateful(Uniform|StandardNormal)")

# Layers that are computed again as a whole. Smaller blocks within them would save next to nothing,
# cost a third forward pass, and add the gradients of queries or of time steps in another order.
_WHOLE = (keras.layers.RNN, keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


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
    block = traced().block
    if isinstance(block, FirstPass):
        return False  # What it computes is not kept anyhow.
    if block is not None and block.whole:
        return False
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
        # A tensor that comes twice, such as an attention's query and value, has one gradient, whose
        # terms are added as without a block.
        self._inputs = _each_once(_floats(self._arguments))
        self._context = KerasContext(function)
        # In a graph, gradients are placed where they are taken, which may be another device.
        device = "" if tf.executing_eagerly() else tf.constant(0.0).device
        self._on_device = functools.partial(tf.device, device) if device else contextlib.nullcontext
        whole = isinstance(getattr(function, "__self__", None), _WHOLE)
        self._first = FirstPass(current_graph(), traced().block, whole)
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
        # Also arguments, which the function may take from elsewhere, too. If it does not, they have
        # no gradient here.
        captured = _each_once([t for t in found if _is_differentiable(t)])
        variables = [v for v in seen.watched_variables() if v.dtype.is_floating]
        # TensorFlow returns them in any order.
        return results, captured, sorted(variables, key=lambda v: v.name)

    def _second_pass(self, inputs: Sequence[tf.Tensor], count: int) -> list[tf.Tensor]:
        """Computes the block again.

        Args:
            inputs: Tensors that replace those of floats in the arguments.
            count: Number of the first pass's outputs.

        Returns:
            The outputs, then the losses.
        """
        again = {id(given): tensor for given, tensor in zip(self._inputs, inputs, strict=True)}
        tensors = [again[id(given)] for given in _floats(self._arguments)]
        args, kwargs = _replaced(self._arguments, tensors)
        second = SecondPass(self._first, self._name)
        scope = keras.StatelessScope(initialize_variables=False)
        scope.state_mapping.update(self._first.state)
        with contextlib.ExitStack() as state:
            state.enter_context(tracing(block=second))
            state.enter_context(self._context.again())
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
            inputs = _after(upstream, self._inputs)
            for tensor, given in zip(inputs, self._inputs, strict=True):
                if get_keras_mask(given) is not None:
                    set_keras_mask(tensor, get_keras_mask(given))
            sources = [*inputs, *captured, *variables]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                outputs = self._second_pass(inputs, count)
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


def _each_once(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _replaced(structure: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Returns a structure with other tensors of floats, in the order of `_floats`."""
    remaining = iter(tensors)
    return _mapped(lambda leaf: next(remaining) if _is_differentiable(leaf) else leaf, structure)


def _taken_from_elsewhere(operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """Returns the inputs of operations that are not computed by one of them.

    A graph that reads a small tensor from outside has a constant of it.
    """
    own = {o.name for o in operations if o.type not in ("Placeholder", "Const")}
    inputs = [tensor for operation in operations for tensor in operation.inputs]
    return [tensor for tensor in inputs if tensor.op.name not in own]


def _closure(function: Callable) -> list[Any]:
    """Returns what a function that runs eagerly takes from the function or the file around it."""
    if isinstance(function, functools.partial):
        return [*_floats((function.args, function.keywords)), *_closure(function.func)]
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        return []
    around = inspect.getclosurevars(function)
    tensors = [value for value in around.globals.values() if isinstance(value, tf.Tensor)]
    return _floats([list(around.nonlocals.values()), tensors])


def _refuse_random(operations: Sequence[tf.Operation], name: str) -> None:
    for operation in operations:
        if operation.op_def.is_stateful and _RANDOM.search(operation.type):
            raise ValueError(
                f"A block of `remat` must draw random numbers by `keras.random`, because those of "
                f"`tf.random` would be others when it is computed again for its gradient. "
                f"Received: {name!r} with the operation {operation.name!r} of type "
                f"{operation.type}. Use `keras.random` with a `SeedGenerator`."
            )


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


REPLACEMENTS: list[Replacement] = [
    (core, "remat", _remat),
    (keras.layers.Layer, "rematerialized_call", _rematerialized_call),
]
