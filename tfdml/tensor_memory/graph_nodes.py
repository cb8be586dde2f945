"""A traced step's operations as `Node`s: which buffers they share, reuse and allocate."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.tensor_memory.liveness import Node, find_peak


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Operations whose first output is the first input's memory.
_SAME_MEMORY = _types(
    "Bitcast EnsureShape ExpandDims Identity PreventGradient Reshape Snapshot Squeeze StopGradient "
    "TensorListFromTensor"
)
# Operations that write their result into an input's memory if nobody else needs it.
_IN_PLACE = _types(
    "Abs Add AddN AddV2 BiasAdd Cos Div DivNoNan Elu EluGrad Erf Exp FusedBatchNormGradV3 "
    "FusedBatchNormV3 Inv InvGrad LeakyRelu LeakyReluGrad Log LogSoftmax Maximum Minimum Mul "
    "MulNoNan Neg Pow RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad "
    "SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sin Softmax Softplus SoftplusGrad Sqrt SqrtGrad "
    "Square SquaredDifference Sub Tanh TanhGrad Xdivy"
)
# Values that exist before the step, and constants of the graph.
_THERE_ALREADY = frozenset({"Const", "ReadVariableOp", "VarHandleOp"})
# Operations that change nothing, though they are called stateful.
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp"})
# A variant's or a resource's bytes are those of what it refers to.
_REFERENCES = (tf.resource, tf.variant, tf.string)


@dataclasses.dataclass(frozen=True)
class StepNodes:
    """A step as nodes.

    Attributes:
        nodes: The operations, in the order in which the step was written.
        sizes: Bytes of each buffer.
        num_before_update: Number of nodes before those of the first update.
        num_forward: Number of nodes before those of the backward pass.
        gradients: Buffers of the gradients.
        unknown: Names of operations with outputs whose size is not known before they run.
        watched: Buffers of the tensors that were asked for; None for those that the step does not
            allocate.
    """

    nodes: list[Node]
    sizes: list[int]
    num_before_update: int
    num_forward: int
    gradients: frozenset[int]
    unknown: tuple[str, ...]
    watched: tuple[int | None, ...] = ()


def nodes_of(
    graph: tf.Graph,
    results: Iterable[Any],
    gradients: Sequence,
    first_of_update: int,
    outside: Iterable[tf.Tensor],
    watched: Sequence[tf.Tensor] = (),
) -> StepNodes:
    """Converts a traced step.

    Operations whose results nobody needs are left out, as TensorFlow leaves them out.

    Args:
        graph: The step's graph.
        results: Tensors that the step returns.
        gradients: Its gradients: tensors, `tf.IndexedSlices` or None.
        first_of_update: Number of operations before those of the first update.
        outside: Inputs of the graph that somebody else has allocated, as variables.
        watched: Tensors whose buffers are to be known.
    """
    operations = graph.get_operations()
    own = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
    roots = [t.op for t in (*_tensors(results, graph), *own)]
    buffers = _Buffers({t.ref() for t in outside})
    nodes: list[Node] = []
    num_before, num_forward = 0, None
    needed = _needed(operations, roots)
    for index, operation in enumerate(operations):
        if operation not in needed:
            continue
        if num_forward is None and "gradient_tape/" in operation.name:
            num_forward = len(nodes)
        node = buffers.add(operation)
        if node is not None:
            nodes.append(node)
            num_before += index < first_of_update
    kept = {buffers.of(t) for t in own} - {None}
    return StepNodes(
        nodes,
        buffers.sizes,
        num_before,
        num_before if num_forward is None else num_forward,
        frozenset(kept),
        tuple(buffers.unknown),
        tuple(buffers.of(tensor) for tensor in watched),
    )


class _Buffers:
    """The buffers of a graph, numbered in the order in which they are allocated.

    Args:
        outside: References of the graph's inputs that somebody else has allocated.
    """

    def __init__(self, outside: set):
        self.sizes: list[int] = []
        self.unknown: list[str] = []
        self._of: dict[Any, int | None] = {}
        self._outside = outside

    def of(self, tensor: tf.Tensor) -> int | None:
        """Returns the number of a tensor's buffer; None if the step does not allocate it."""
        return self._of.get(tensor.ref())

    def add(self, operation: tf.Operation) -> Node | None:
        """Adds an operation's outputs; returns it as a node, None if it neither reads nor makes."""
        if operation.type in _THERE_ALREADY:
            return None
        if operation.type == "Placeholder" and operation.outputs[0].ref() in self._outside:
            return None
        reads = tuple({b: None for t in operation.inputs if (b := self.of(t)) is not None})
        outputs = list(operation.outputs)
        if operation.type in _SAME_MEMORY or operation.type == "IdentityN":
            for output, given in zip(outputs, operation.inputs, strict=False):
                self._of[output.ref()] = self.of(given)
            outputs = []
        body = _body(operation)
        self.unknown += () if body is None else body.unknown
        lists = _lists_of_loop(operation, body)
        made = [self._new(t, operation, lists.get(i, 0)) for i, t in enumerate(outputs)]
        makes = tuple(b for b in made if b is not None)
        if not reads and not makes:
            return None
        inside = 0 if body is None else max(0, body.peak - sum(self.sizes[b] for b in makes))
        return Node(operation.name, reads, makes, operation.type in _IN_PLACE, inside)

    def _new(self, tensor: tf.Tensor, operation: tf.Operation, list_bytes: int) -> int | None:
        nbytes = list_bytes if tensor.dtype in _REFERENCES else nbytes_of(tensor)
        if nbytes is None:
            self.unknown.append(operation.name)
        if not nbytes:
            return None
        self.sizes.append(nbytes)
        self._of[tensor.ref()] = len(self.sizes) - 1
        return len(self.sizes) - 1


def nbytes_of(tensor: Any) -> int | None:
    """Returns the bytes of a tensor or variable; None if its shape is not known."""
    count = tf.TensorShape(tensor.shape).num_elements()
    return None if count is None else count * tf.as_dtype(tensor.dtype).size


def variables_bytes(variables: Iterable[keras.Variable]) -> int:
    """Returns the bytes of some variables, each counted once."""
    return sum(nbytes_of(v) for v in {id(v): v for v in variables}.values())


def _tensors(results: Iterable[Any], graph: tf.Graph) -> list[tf.Tensor]:
    flat = tf.nest.flatten(results, expand_composites=True)
    return [t for t in flat if tf.is_tensor(t) and getattr(t, "graph", None) is graph]


def _needed(operations: Sequence[tf.Operation], roots: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that results or changes of variables depend on."""
    changes = [
        o
        for o in operations
        if o.op_def.is_stateful and o.type not in _READS and not _gives_first_value(o)
    ]
    found: set[tf.Operation] = set()
    waiting = [*roots, *changes]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [t.op for t in operation.inputs]
    return found


def _gives_first_value(operation: tf.Operation) -> bool:
    """Returns whether an operation is of a variable's creation, and not of each step."""
    if operation.type == "VarIsInitializedOp":
        return True
    return operation.type == "If" and operation.inputs[0].op.type == "VarIsInitializedOp"


# -- Operations that have a graph of their own: conditions, loops, functions ---------------------


@dataclasses.dataclass(frozen=True)
class _Body:
    """The graph of a loop's body, a branch or a function.

    Attributes:
        graph: The graph.
        peak: Bytes that its own tensors take.
        unknown: Names of its operations with outputs whose size is not known.
    """

    graph: tf.Graph
    peak: int
    unknown: tuple[str, ...]


_ATTRIBUTES = {
    "While": ("body",),
    "StatelessWhile": ("body",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


def _body(operation: tf.Operation) -> _Body | None:
    """Returns the graph in an operation that takes most bytes; None if it has none.

    Operations of unknown size are those of all its graphs.
    """
    if operation.type in ("Case", "StatelessCase"):
        names = [f.name for f in operation.get_attr("branches")]
    else:
        names = [operation.get_attr(a).name for a in _ATTRIBUTES.get(operation.type, ())]
    bodies = [_measured(operation.graph, name) for name in names]
    if not bodies:
        return None
    largest = max(bodies, key=lambda body: body.peak)
    unknown = tuple(name for body in bodies for name in body.unknown)
    return dataclasses.replace(largest, unknown=unknown)


def _measured(graph: tf.Graph, name: str) -> _Body:
    body = graph._get_function(name).graph
    steps = nodes_of(body, body.outputs, (), 0, body.inputs)
    return _Body(body, find_peak(steps.nodes, steps.sizes).nbytes, steps.unknown)


def _lists_of_loop(operation: tf.Operation, body: _Body | None) -> dict[int, int]:
    """Returns the bytes of the lists that a loop fills, as of an RNN's steps, by output.

    A tensor that enters several lists is counted once, in the longest.
    """
    if body is None or operation.type not in ("While", "StatelessWhile"):
        return {}
    inputs = {tensor.ref(): i for i, tensor in enumerate(body.graph.inputs)}
    items: dict[Any, tuple[int, int]] = {}
    for op in body.graph.get_operations():
        if op.type not in _ITEM or (index := inputs.get(_origin(op.inputs[0]).ref())) is None:
            continue
        item = _origin(op.inputs[_ITEM[op.type]])
        if item.ref() in inputs:
            # What enters a turn of the loop is what the turn before has returned.
            item = _origin(body.graph.outputs[inputs[item.ref()]])
        length = _length_of_list(operation.inputs[index].op)
        if item.op.type not in _REFERRED_TO:
            own = length * (nbytes_of(item) or 0), index
            items[item.ref()] = max(own, items.get(item.ref(), own))
    found: dict[int, int] = {}
    for nbytes, index in items.values():
        found[index] = found.get(index, 0) + nbytes
    return found


# The input that holds the item, by operation.
_ITEM = {"TensorListPushBack": 1, "TensorListSetItem": 2}
# Operations whose result is memory that exists before the loop.
_REFERRED_TO = frozenset({"Const", "Placeholder", "ReadVariableOp", "TensorListGetItem"})


def _length_of_list(operation: tf.Operation) -> int:
    if operation.type not in ("EmptyTensorList", "TensorListReserve"):
        return 0
    length = _static_value(operation.inputs[1])
    return 0 if length is None else max(0, int(length))


def _static_value(tensor: tf.Tensor) -> Any:
    """Returns a tensor's value if it does not depend on data, also that of Keras's loops."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type in ("Identity", "Max"):
        inner = _static_value(tensor.op.inputs[0])
        return None if inner is None else np.max(inner)
    return value


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[0]
    return tensor
