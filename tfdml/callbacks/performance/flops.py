"""Floating-point operations of a model's training, counted in the graph of its forward pass."""

import math

import keras
import tensorflow as tf

# The gradients of a product's two factors take a product of the same size each.
_PASSES = 3
_PRODUCTS = {"MatMul": "transpose_a"} | {
    f"BatchMatMul{version}": "adj_x" for version in ("", "V2", "V3")
}
_CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})
_TRANSPOSED_CONVOLUTIONS = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2"})
# Operations that run a function, or one of several, and the attributes that have them.
_CALLS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}
# Operations whose work cannot be seen: loops, of which the graph does not say how often they run,
# and recurrent layers that are one operation.
_UNCOUNTABLE = frozenset({"While", "StatelessWhile", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"})


def training_flops(model: keras.Model) -> float | None:
    """Returns the floating-point operations of a training step for one row.

    Counted are products of matrices and convolutions, a multiplication and an addition as two
    operations: those of the forward pass, and twice as many for the gradients. Not counted are
    operations by element, lookups, the optimizer, and what is computed again (`tfdml.remat`).

    Args:
        model: The model, built.

    Returns:
        The number; None if the shapes of the inputs are not known, as of subclassed models, if the
        model does not take a single row, or if it has loops, such as recurrent layers, or branches
        of different work.
    """
    inputs = getattr(model, "_inputs_struct", None)
    if inputs is None:
        inputs = next(iter(getattr(model, "inputs", None) or []), None)
    if any(
        t is None or t.sparse or t.ragged or None in t.shape[1:] for t in tf.nest.flatten(inputs)
    ):
        return None
    row = tf.nest.map_structure(lambda t: tf.TensorSpec([1, *t.shape[1:]], t.dtype), inputs)
    forward = tf.function(lambda row: model(row, training=False), autograph=False)
    try:
        graph = forward.get_concrete_function(row).graph
    except Exception:  # noqa: BLE001 (whatever a layer raises for one row, training goes on)
        return None
    try:
        flops = _flops_of_graph(graph)
    except _NotCountableError:
        return None
    return float(_PASSES * flops) if flops else None


class _NotCountableError(Exception):
    """The operations of a graph cannot be counted."""


def _flops_of_graph(graph: tf.Graph) -> int:
    return sum(_flops(operation) for operation in graph.get_operations())


def _flops(operation: tf.Operation) -> int:
    kind = operation.type
    if kind in _UNCOUNTABLE:
        raise _NotCountableError
    if kind in _CALLS:
        return _flops_of_call(operation)
    if kind == "Einsum":
        return 2 * _products_of_einsum(operation)
    if kind in _PRODUCTS:
        columns = operation.inputs[0].shape[-2 if operation.get_attr(_PRODUCTS[kind]) else -1]
        return 2 * _size(operation.outputs[0].shape) * _size([columns])
    if kind in _CONVOLUTIONS:
        # Each element of the result is a sum over a window of all channels.
        return 2 * _size(operation.outputs[0].shape) * _size(operation.inputs[1].shape[:-1])
    if kind == "DepthwiseConv2dNative":
        return 2 * _size(operation.outputs[0].shape) * _size(operation.inputs[1].shape[:-2])
    if kind in _TRANSPOSED_CONVOLUTIONS:
        # Each element of the input is added to a window of all channels of the result.
        _, kernel, given = operation.inputs
        return 2 * _size(given.shape) * _size(kernel.shape[:-1])
    return 0


def _flops_of_call(operation: tf.Operation) -> int:
    functions = [operation.get_attr(name) for name in _CALLS[operation.type]]
    graphs = [operation.graph._get_function(f.name).graph for f in _flat(functions)]
    flops = {_flops_of_graph(graph) for graph in graphs}
    if len(flops) > 1:
        raise _NotCountableError
    return flops.pop()


def _flat(functions: list) -> list:
    return functions[0] if isinstance(functions[0], list) else functions


def _size(shape: tf.TensorShape | list[int | None]) -> int:
    """Returns the number of elements of a shape."""
    if None in list(shape):
        raise _NotCountableError
    return math.prod(shape)


def _products_of_einsum(operation: tf.Operation) -> int:
    """Returns how many products an `Einsum` adds up: one for each place along all its axes."""
    axes: dict[str, int] = {}
    broadcast = 1
    factors = operation.get_attr("equation").decode().split("->")[0].split(",")
    for labels, tensor in zip(factors, operation.inputs, strict=True):
        _size(tensor.shape)
        shape = tensor.shape.as_list()
        before, _, after = labels.partition("...")
        axes |= dict(zip(before, shape, strict=False))
        axes |= dict(zip(reversed(after), reversed(shape), strict=False))
        broadcast = max(broadcast, math.prod(shape[len(before) : len(shape) - len(after)]))
    return broadcast * math.prod(axes.values())
