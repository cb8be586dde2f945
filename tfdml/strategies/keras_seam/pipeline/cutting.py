"""Which stage each call of a model's layers belongs to: decided once for each model."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.pipeline.cuts import cut_by_names
from tfdml.pipeline.layer_graph import LayerGraph, function_of
from tfdml.pipeline.plan import make_plan
from tfdml.strategies.replicas.extended import ReplicaExtended

# Rows of a microbatch for which a model is cut if the size of a batch is not known.
_ROWS = 8
# Keras's default for arrays.
_BATCH_SIZE = 32


def get_stages(model: keras.Model, extended: ReplicaExtended) -> tuple[LayerGraph, list[int]]:
    """Returns a model's graph, and the stage of each of its calls, the same on all ranks.

    Args:
        model: The model, built.
        extended: Its strategy's extended part, with a pipeline.

    Raises:
        ValueError: If the model has no graph, or cannot be divided as the pipeline says.
    """
    graph, _ = extended.stages.get(model, (None, []))
    # A Sequential model has another function after `add`.
    if graph is None or graph.function is not function_of(model):
        graph = LayerGraph(model)
        _warn_of_statistics(graph, extended)
        extended.stages[model] = graph, _assignment(model, graph, extended)
    return extended.stages[model]


def check_rows(arguments: Mapping[str, Any], extended: ReplicaExtended) -> None:
    """Checks that a batch has a row for each microbatch of each replica, if its size is known.

    The rows of a replica are noted: the model may be cut by them.

    Args:
        arguments: Arguments of `fit`, `evaluate` or `predict`.
        extended: The strategy's extended part, with a pipeline.

    Raises:
        ValueError: If it has not.
    """
    data = arguments.get("x")
    if isinstance(data, tf.data.Dataset):
        spec = tf.nest.flatten(data.element_spec, expand_composites=True)[0]
        rows = spec.shape[0] if spec.shape.rank else None
    elif keras.ops.is_tensor(data) or isinstance(data, np.ndarray | list | tuple | dict):
        rows = arguments.get("batch_size") or _BATCH_SIZE
    else:
        return
    number, replicas = extended.options.pipeline.num_microbatches, extended._num_replicas_in_sync
    if rows is not None and rows < number * replicas:
        raise ValueError(
            f"A batch must have a row for each of the {number} microbatches of each of the "
            f"{replicas} replicas: {number * replicas} rows. Received: batches of {rows} rows. "
            f"Use larger batches, or a smaller `num_microbatches` of `tfdml.PipelineParallel`."
        )
    extended.rows_of_group = rows and rows // replicas


def _assignment(model: keras.Model, graph: LayerGraph, extended: ReplicaExtended) -> list[int]:
    pipeline, collective = extended.options.pipeline, extended.collective
    if pipeline.stages is not None:
        return cut_by_names(graph, pipeline.stages)
    own = np.zeros(len(graph.calls), np.int64)
    if collective.rank == 0:
        plan = make_plan(
            model,
            extended.rows_of_group or _ROWS * pipeline.num_microbatches,
            num_stages=len(extended.device_groups[0]),
            num_microbatches=pipeline.num_microbatches,
            schedule=pipeline.schedule,
            memory_limits=pipeline.memory_limits,
        )
        own = np.array(plan.assignment, np.int64)
    if collective.size > 1:
        # Measured times differ from rank to rank.
        own = collective.broadcast(tf.constant(own), extended.unique_name("stages")).numpy()
    return own.tolist()


def _warn_of_statistics(graph: LayerGraph, extended: ReplicaExtended) -> None:
    layers = [c.operation for c in graph.calls]
    found = [x for x in layers if isinstance(x, keras.layers.BatchNormalization) and x.trainable]
    if found and extended.collective.topology.is_chief:
        warnings.warn(
            f"BatchNormalization takes its mean and variance over a microbatch in a pipeline, so "
            f"that training differs from that of one device, as with a smaller batch: layer "
            f"{found[0].name!r}. Use for example GroupNormalization or LayerNormalization.",
            stacklevel=2,
        )
