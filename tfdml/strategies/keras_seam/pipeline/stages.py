"""A model's graph in stages: each is a function that runs on a device of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.ops.function import Function

from tfdml.pipeline.layer_graph import LayerGraph, variables_of
from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.traced import traced, tracing

# Names of the stages' functions: TensorFlow derives those of their gradients from them.
STAGE_NAME = "pipeline_stage_{}_of_{}"


class StagePass:
    """The pass of a stage over its layers: it notes added losses, which the stage returns.

    It stands where `remat` has a pass of a block, see `block_passes`.

    Attributes:
        losses: The losses added, each with the layer that added it.
    """

    # A block of `remat` in the stage is computed again as outside of it.
    whole = False

    def __init__(self) -> None:
        self.losses: list[tuple[keras.Layer, tf.Tensor]] = []

    def seed(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a new seed."""
        return draw()

    def change(self, variable: keras.Variable) -> None:
        """Does nothing: the stage's function assigns the variable."""

    def add_loss(self, layer: keras.Layer, loss: tf.Tensor) -> None:
        """Notes a loss."""
        self.losses.append((layer, loss))


class Stages:
    """A model's stages in one trace of a step, for all of its microbatches.

    Args:
        graph: The model's graph.
        assignment: The stage of each of the graph's calls.
        devices: The device of each stage.
        jit_compile: Whether XLA compiles each stage, except those that use another stage's
            variables: XLA reads only those of its device.
    """

    def __init__(
        self,
        graph: LayerGraph,
        assignment: Sequence[int],
        devices: Sequence[str],
        jit_compile: bool,
    ):
        self.devices = devices
        self._graph = graph
        numbers = range(len(devices))
        owners = {key: assignment[call] for key, call in graph.owners().items()}
        self._calls = [
            [c for c, own in zip(graph.calls, assignment, strict=True) if own == s] for s in numbers
        ]
        made = [[t for call in calls for t in call.outputs] for calls in self._calls]
        used = [[t for call in calls for t in call.input_tensors] for calls in self._calls]
        self._takes = [_without(used[s], made[s]) for s in numbers]
        self._gives = [
            _only(made[s], [*graph.outputs, *(t for later in used[s + 1 :] for t in later)])
            for s in numbers
        ]
        self._jit_compile = [
            jit_compile and all(owners[id(v)] == s for call in calls for v in variables_of(call))
            for s, calls in enumerate(self._calls)
        ]
        # The function of each stage, by the call's `training`.
        self._functions: dict[tuple[int, Any], _StageFunction] = {}

    @property
    def mask_layers(self) -> list[str]:
        """Names of the layers that make masks."""
        operations = [call.operation for call in self._graph.calls]
        makers = [x for x in operations if isinstance(x, keras.layers.Masking)]
        makers += [x for x in operations if getattr(x, "mask_zero", False)]
        return [maker.name for maker in makers]

    def is_of(self, function: Function) -> bool:
        """Returns whether these are the stages of a functional model."""
        return self._graph.function is function

    def __call__(self, inputs: Sequence, operation_fn: Callable) -> Any:
        """Runs the graph.

        Args:
            inputs: The model's inputs, flat; they may carry masks.
            operation_fn: Function that returns what a layer's call runs, with the arguments that
                Keras passes to all layers, such as `training`.

        Returns:
            The model's outputs, in its structure.
        """
        graph = self._graph
        tensors = {id(ref): value for ref, value in zip(graph.inputs, inputs, strict=True)}
        call = get_global_attribute("current_call_ctx")
        share = traced().share
        for number, device in enumerate(self.devices):
            key = number, getattr(call, "training", None)
            if key not in self._functions:
                self._functions[key] = self._stage_function(number, operation_fn)
            own = [tensors[id(ref)] for ref in self._takes[number]]
            with tf.device(device):
                results = self._functions[key](own, share)
            tensors.update(zip(map(id, self._gives[number]), results, strict=True))
        outputs = [tensors[id(ref)] for ref in graph.outputs]
        return keras.tree.pack_sequence_as(graph.function._outputs_struct, outputs)

    def _stage_function(self, number: int, operation_fn: Callable) -> "_StageFunction":
        return _StageFunction(
            STAGE_NAME.format(number, len(self.devices)),
            self._calls[number],
            self._takes[number],
            self._gives[number],
            operation_fn,
            self._jit_compile[number],
        )


class _StageFunction:
    """The function of one stage, traced once for all microbatches of the same shapes.

    Args:
        name: Its name in the graph.
        calls: Its calls of layers, in order.
        takes: Symbolic tensors that it takes.
        gives: Symbolic tensors that it returns.
        operation_fn: As in `Stages.__call__`.
        jit_compile: Whether XLA compiles it.
    """

    def __init__(
        self,
        name: str,
        calls: Sequence,
        takes: Sequence[keras.KerasTensor],
        gives: Sequence[keras.KerasTensor],
        operation_fn: Callable,
        jit_compile: bool,
    ):
        self._calls, self._takes, self._gives = calls, takes, gives
        self._operation_fn = operation_fn
        # Set by the trace: those of other shapes have the same layers.
        self._adding: list[keras.Layer] = []

        def run(values: list, masks: list, rows: Any, global_rows: Any) -> tuple:
            return self._run(values, masks, rows, global_rows)

        run.__name__ = name
        self._function = tf.function(
            run,
            autograph=False,
            jit_compile=jit_compile or None,
            reduce_retracing=True,
            # Parts of a function that is put in the place of its call would not keep the order.
            experimental_attributes={"_noinline": True},
        )

    def __call__(self, values: list, share: ShareInfo) -> list:
        """Returns the stage's results; they carry their masks, and its losses are added."""
        run = self._run if tf.executing_eagerly() else self._function
        masks = [None if v is None else get_keras_mask(v) for v in values]
        results, masks, losses = run(values, masks, share.rows, share.global_rows)
        for value, mask in zip(results, masks, strict=True):
            if mask is not None:
                set_keras_mask(value, mask)
        for layer, loss in zip(self._adding, losses, strict=True):
            layer.add_loss(loss)
        return results

    def _run(self, values: list, masks: list, rows: Any, global_rows: Any) -> tuple:
        for value, mask in zip(values, masks, strict=True):
            if mask is not None:
                set_keras_mask(value, mask)
        tensors = {id(ref): value for ref, value in zip(self._takes, values, strict=True)}
        own_pass = StagePass()
        with tracing(share=ShareInfo(rows, global_rows), block=own_pass):
            for call in self._calls:
                args, kwargs = call.arguments.fill_in(tensors)
                outputs = _called(self._operation_fn(call.operation), call, args, kwargs)
                flat = keras.tree.flatten(outputs)
                tensors.update(zip(map(id, call.outputs), flat, strict=True))
        results = [tensors[id(ref)] for ref in self._gives]
        self._adding = [layer for layer, _ in own_pass.losses]
        masks = [None if value is None else get_keras_mask(value) for value in results]
        return results, masks, [loss for _, loss in own_pass.losses]


def _called(function: Callable, call: Any, args: tuple, kwargs: dict) -> Any:
    """Calls a layer, and raises a clear error if replicas exchange something in it."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise ValueError(
            f"A layer in a pipeline must not exchange anything with other replicas, like "
            f"`BatchNormalization(synchronized=True)`: a stage is a function on its own device. "
            f"Received: layer {call.operation.name!r}. Use for example `GroupNormalization`."
        ) from error


def _without(tensors: Sequence, others: Sequence) -> list:
    """Returns each of `tensors` once that is not among `others`."""
    known = set(map(id, others))
    return list({id(t): t for t in tensors if id(t) not in known}.values())


def _only(tensors: Sequence, others: Sequence) -> list:
    """Returns each of `tensors` once that is among `others`."""
    known = set(map(id, others))
    return list({id(t): t for t in tensors if id(t) in known}.values())


def _run_through_graph(original: Callable) -> Callable:
    def run_through_graph(self, inputs, operation_fn=lambda op: op, call_fn=None):
        stages = traced().stages
        if stages is None or call_fn is not None or not stages.is_of(self):
            return original(self, inputs, operation_fn, call_fn)
        return stages(keras.tree.flatten(inputs), operation_fn)

    return run_through_graph


REPLACEMENTS: list[Replacement] = [(Function, "_run_through_graph", _run_through_graph)]
