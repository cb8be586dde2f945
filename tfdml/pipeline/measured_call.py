"""One call of a layer on its own: its times, and what it keeps for its backward pass."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.pipeline.layer_graph import tensors_of, variables_of
from tfdml.tensor_memory.graph_nodes import nodes_of
from tfdml.tensor_memory.liveness import last_uses

# Passes are run in turns, and the fastest run of each counts: at least so often and so many
# seconds, unless it takes too many.
_TURNS = 10
_SECONDS = 0.05
_MOST_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class KeptTensors:
    """Tensors that a call keeps for its backward pass.

    Attributes:
        inside: Bytes of tensors that are neither its inputs nor its outputs.
        inputs: Numbers of the inputs that its backward pass reads.
        outputs: Numbers of the outputs that its backward pass reads.
        same: For each output in the memory of an input, as of a reshape, the number of that input.
    """

    inside: int = 0
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    same: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class MeasuredCall:
    """What a call was measured to take.

    Attributes:
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        outputs: Shapes and dtypes of its outputs.
        kept: What it keeps.
    """

    forward: float
    backward: float
    outputs: list[tf.TensorSpec]
    kept: KeptTensors = KeptTensors()


def call_overhead() -> float:
    """Returns the seconds that it takes to call a function that does nothing."""
    nothing = tf.function(tf.identity).get_concrete_function(tf.TensorSpec((), "float32"))
    zero = tf.constant(0.0)
    return _fastest(lambda: nothing(zero))[0]


def measure_call(
    call: Any, specs: Sequence[tf.TensorSpec], differentiated: Sequence[int], overhead: float
) -> MeasuredCall:
    """Runs a call as in training, on random numbers, and leaves its layer's state as it was.

    Args:
        call: The call: a node of Keras.
        specs: Shapes and dtypes of `tensors_of(call)`, without unknown sizes.
        differentiated: Numbers of the inputs for which the backward pass makes gradients, besides
            those of trainable weights. Without any of both, there is no backward pass.
        overhead: Seconds that are subtracted from each run.
    """
    variables = variables_of(call)
    given = [*map(_random, specs), *(tf.convert_to_tensor(v.value) for v in variables)]
    run = _forward(call, variables)
    forward = _traced(run, given)
    with _restored(forward.variables):
        results = forward(given)
        outputs = [tf.TensorSpec(result.shape, result.dtype) for result in results]
        trainable = {id(variable) for variable in variables_of(call, trainable=True)}
        weights = [len(specs) + n for n, v in enumerate(variables) if id(v) in trainable]
        sources = [*differentiated, *weights]
        ones = [tf.ones_like(result) for result in results if _has_gradient(result)]
        if not sources or not ones:
            (seconds,) = _fastest(lambda: forward(given))
            return MeasuredCall(max(0.0, seconds - overhead), 0.0, outputs)
        both, kept = _both_passes(run, sources, len(specs), given, ones)
        both(given, ones)
        seconds, of_both = _fastest(lambda: forward(given), lambda: both(given, ones))
    return MeasuredCall(
        max(0.0, seconds - overhead), max(0.0, of_both - max(seconds, overhead)), outputs, kept
    )


def _both_passes(
    run: Callable[[list], list],
    sources: Sequence[int],
    count: int,
    given: list[tf.Tensor],
    output_gradients: list[tf.Tensor],
) -> tuple[Callable, KeptTensors]:
    """Returns a traced function of the forward and the backward pass, and what it keeps.

    Args:
        run: The forward pass.
        sources: Numbers of those of its arguments for which gradients are made.
        count: The number of arguments that are a call's inputs; the others are weights.
        given: The arguments.
        output_gradients: A gradient for each result that has one.
    """
    symbolic: list[tuple[list, list]] = []

    def both(given: list[tf.Tensor], output_gradients: list[tf.Tensor]) -> tuple[list, list]:
        with tf.GradientTape() as tape:
            tape.watch([given[n] for n in sources])
            results = run(given)
        targets = [result for result in results if _has_gradient(result)]
        gradients = tape.gradient(
            targets, [given[n] for n in sources], output_gradients=output_gradients
        )
        symbolic.append((results, gradients))
        return results, gradients

    traced = _traced(both, given, output_gradients)
    return traced, _kept(traced.graph, count, *symbolic[0])


def _forward(call: Any, variables: Sequence[keras.Variable]) -> Callable[[list], list]:
    """Returns a function of a call's inputs and its variables' values; it assigns nothing."""
    tensors = tensors_of(call)

    def forward(given: list[tf.Tensor]) -> list[tf.Tensor]:
        inputs = {id(t): v for t, v in zip(tensors, given[: len(tensors)], strict=True)}
        args, kwargs = call.arguments.fill_in(inputs)
        if isinstance(call.operation, keras.Layer):
            # As a functional model does, also for layers without the argument.
            kwargs = {**kwargs, "training": True}
        values = list(zip(variables, given[len(tensors) :], strict=True))
        with keras.StatelessScope(values):
            return keras.tree.flatten(call.operation(*args, **kwargs))

    return forward


def _random(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns random numbers; for integers zeros, which index anything; for booleans True."""
    if spec.dtype.is_floating:
        numbers = tf.random.stateless_normal(spec.shape, (1, 2), dtype="float32")
        return tf.cast(numbers, spec.dtype)
    return (tf.ones if spec.dtype.is_bool else tf.zeros)(spec.shape, spec.dtype)


def _has_gradient(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


# -- Times ---------------------------------------------------------------------------------------


def _traced(function: Callable, *given: list[tf.Tensor]) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*given)


def _fastest(*runs: Callable[[], Any]) -> list[float]:
    """Returns the seconds of the fastest run of each function; they run in turns."""
    fastest, turns, spent = [float("inf")] * len(runs), 0, 0.0
    while (turns < _TURNS or spent < _SECONDS) and (turns < 3 or spent < _MOST_SECONDS):
        for number, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            # On GPUs a function returns before it has run. TensorFlow's `sync_devices` would fail
            # in a cluster, where it waits for other processes' devices as well.
            tf.raw_ops.SyncDevice()
            fastest[number] = min(fastest[number], time.perf_counter() - begin)
        turns += 1
        # Of the fastest runs: others may have waited for other processes.
        spent = turns * sum(fastest)
    return fastest


@contextlib.contextmanager
def _restored(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Context manager: restores variables that a layer has besides those of Keras."""
    before = [variable.read_value() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


# -- Memory --------------------------------------------------------------------------------------


def _kept(graph: tf.Graph, count: int, results: Sequence, gradients: Sequence) -> KeptTensors:
    """Returns what the forward pass in a graph keeps.

    Args:
        graph: A graph of both passes.
        count: The number of the call's inputs. The graph's other ones are there before, weights and
            gradients of results.
        results: The forward pass's results.
        gradients: The gradients.
    """
    inputs, others = graph.inputs[:count], graph.inputs[count:]
    size = len(graph.get_operations())
    step = nodes_of(graph, [results], gradients, size, others, [*inputs, *results])
    last = last_uses(step.nodes)
    forward = step.nodes[: step.num_forward]
    kept = {b for node in forward for b in node.makes if last[b] >= step.num_forward}
    given, made = list(step.watched[:count]), step.watched[count:]
    same = {n: given.index(b) for n, b in enumerate(made) if b is not None and b in given}
    return KeptTensors(
        sum(step.sizes[b] for b in kept.difference(step.watched)),
        frozenset(n for n, b in enumerate(given) if b in kept),
        frozenset(n for n, b in enumerate(made) if b in kept and n not in same),
        same,
    )
