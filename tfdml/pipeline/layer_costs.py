"""Costs of each call of a model's layers: measured times, and bytes."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.pipeline.apart import apart
from tfdml.pipeline.layer_graph import LayerGraph, tensors_of, variables_of
from tfdml.pipeline.measured_call import MeasuredCall, call_overhead, measure_call
from tfdml.tensor_memory.graph_nodes import nbytes_of, variables_bytes


@dataclasses.dataclass(frozen=True)
class CallCost:
    """Cost of one call of a layer for one microbatch.

    Attributes:
        forward: Seconds of its forward pass.
        backward: Seconds of its backward pass.
        weight_bytes: Bytes of the variables that no earlier call uses.
        output_bytes: For each output, its bytes per row of the microbatch.
        kept_bytes: Bytes per row that are kept for backward passes: of tensors inside of the call,
            and of its outputs that it or another call reads again.
    """

    forward: float
    backward: float
    weight_bytes: int = 0
    output_bytes: tuple[float, ...] = ()
    kept_bytes: float = 0.0


def layer_costs(graph: LayerGraph, rows: int) -> list[CallCost]:
    """Measures each call of a model, in training, on random numbers.

    A call is compiled on its own, and the fastest of several runs counts. Calls that are equal but
    for their weights' values are measured once. All run on TensorFlow's default device. Nothing of
    the model is changed: no weight, no moving statistics, no seed.

    Args:
        graph: The model's calls.
        rows: Rows of a microbatch.

    Returns:
        The costs of `graph.calls`. An input of the model that a backward pass reads counts as kept
        by the first call that reads it.

    Raises:
        ValueError: If an input has a size that is not known, or a call fails; with its name.
    """
    found, specs = apart(_measure, graph, rows)
    kept = _kept_bytes(graph, found, specs)
    owners = graph.owners()
    return [
        CallCost(
            result.forward,
            result.backward,
            variables_bytes(v for v in variables_of(call) if owners[id(v)] == number),
            tuple(nbytes_of(spec) / rows for spec in result.outputs),
            kept[number] / rows,
        )
        for number, (call, result) in enumerate(zip(graph.calls, found, strict=True))
    ]


def _measure(graph: LayerGraph, rows: int) -> tuple[list[MeasuredCall], dict[int, tf.TensorSpec]]:
    """Returns the measured calls, and for the id of each tensor its shape and dtype."""
    specs = {id(tensor): _spec_of_input(tensor, rows) for tensor in graph.inputs}
    # Tensors that depend on trainable weights: gradients of others are not needed.
    trained: set[int] = set()
    measured: dict[Any, MeasuredCall] = {}
    found: list[MeasuredCall] = []
    overhead = call_overhead()
    for call in graph.calls:
        tensors = tensors_of(call)
        given = [specs[id(tensor)] for tensor in tensors]
        differentiated = [n for n, t in enumerate(tensors) if id(t) in trained]
        key = _likeness(call, given, differentiated)
        if key not in measured:
            measured[key] = _measure_call(call, given, differentiated, overhead)
        found.append(measured[key])
        results = zip(call.outputs, measured[key].outputs, strict=True)
        specs |= {id(tensor): spec for tensor, spec in results}
        if differentiated or variables_of(call, trainable=True):
            trained |= {id(t) for t in call.outputs if specs[id(t)].dtype.is_floating}
    return found, specs


def _measure_call(
    call: Any, given: Sequence[tf.TensorSpec], differentiated: Sequence[int], overhead: float
) -> MeasuredCall:
    try:
        return measure_call(call, given, differentiated, overhead)
    except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
        raise ValueError(
            f"Each layer must run on its own to be measured. Received: {call.operation.name!r}, "
            f"which fails on {list(given)}: {error} Pass `stages` with the layers of each stage, "
            f"for which nothing is measured."
        ) from error


def _spec_of_input(tensor: keras.KerasTensor, rows: int) -> tf.TensorSpec:
    if None in tensor.shape[1:] or tensor.sparse:
        raise ValueError(
            f"Layers are measured on inputs of known sizes. Received: the input {tensor.name!r} "
            f"of the shape {tensor.shape}{', which is sparse' if tensor.sparse else ''}. Build the "
            f"model with keras.Input of a full shape, or pass `stages` with the layers of each "
            f"stage, for which nothing is measured."
        )
    return tf.TensorSpec((rows, *tensor.shape[1:]) if tensor.shape else (), tensor.dtype)


# -- Calls that are equal ------------------------------------------------------------------------


def _likeness(call: Any, specs: Sequence[tf.TensorSpec], differentiated: Sequence[int]) -> tuple:
    """Returns what calls have in common that cost the same."""
    operation = call.operation
    places = {id(tensor): n for n, tensor in enumerate(tensors_of(call))}
    arguments = keras.tree.map_structure(
        lambda leaf: _likeness_of_argument(leaf, places),
        (call.arguments.args, call.arguments.kwargs),
    )
    trainable = {id(variable) for variable in variables_of(call, trainable=True)}
    variables = [(tuple(v.shape), v.dtype, id(v) in trainable) for v in variables_of(call)]
    return (
        type(operation),
        _config(operation),
        repr(arguments),
        tuple(variables),
        tuple((tuple(spec.shape), spec.dtype) for spec in specs),
        tuple(differentiated),
    )


def _likeness_of_argument(leaf: Any, places: dict[int, int]) -> str:
    if isinstance(leaf, keras.KerasTensor):
        return f"input {places[id(leaf)]}"
    if isinstance(leaf, keras.Variable):
        return f"variable {leaf.shape}"
    if leaf is None or isinstance(leaf, bool | int | float | str | slice):
        return repr(leaf)
    return f"object {id(leaf)}"


def _config(operation: Any) -> str:
    """Returns an operation's config without names; its identity if it has none."""
    try:
        text = json.dumps(_without_names(operation.get_config()), sort_keys=True)
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return f"object {id(operation)}"
    # In configs of models, calls refer to layers such as "dense_3".
    return re.sub(r'_\d+(?=")', "", text)


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    if isinstance(config, list | tuple):
        return [_without_names(value) for value in config]
    return config


# -- Tensors that are kept -----------------------------------------------------------------------


def _kept_bytes(
    graph: LayerGraph, measured: Sequence[MeasuredCall], specs: dict[int, tf.TensorSpec]
) -> list[int]:
    """Returns the bytes of a microbatch that each call keeps, each tensor counted once."""
    kept = [result.kept.inside for result in measured]
    # For the id of each tensor: the id of the tensor whose memory it is, and that one's maker.
    memory = {id(tensor): id(tensor) for tensor in graph.inputs}
    maker: dict[int, int] = {}
    read_again: dict[int, int] = {}
    for number, (call, result) in enumerate(zip(graph.calls, measured, strict=True)):
        tensors = tensors_of(call)
        for place, tensor in enumerate(call.outputs):
            same = result.kept.same.get(place)
            memory[id(tensor)] = id(tensor) if same is None else memory[id(tensors[same])]
            maker.setdefault(memory[id(tensor)], number)
        again = [tensors[n] for n in result.kept.inputs]
        again += [call.outputs[n] for n in result.kept.outputs]
        for tensor in again:
            read_again.setdefault(memory[id(tensor)], number)
    for tensor, reader in read_again.items():
        kept[maker.get(tensor, reader)] += nbytes_of(specs[tensor])
    return kept
