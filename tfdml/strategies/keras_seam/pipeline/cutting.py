"""Which stage each call of a model's layers belongs to: decided once for each model."""

import keras

from tfdml.pipeline.layer_graph import LayerGraph
from tfdml.strategies.replicas.extended import ReplicaExtended


def stages_of(model: keras.Model, extended: ReplicaExtended) -> tuple[LayerGraph, list[int]]:
    """Returns a model's graph, and the stage of each of its calls.

    Args:
        model: The model, built.
        extended: Its strategy's extended part, with a pipeline.

    Raises:
        ValueError: If the model has no graph, or cannot be divided as the pipeline says.
    """
    if model not in extended.stages:
        graph = LayerGraph(model)
        count = len(extended.device_groups[0])
        n = len(graph.calls)
        extended.stages[model] = graph, [i * count // n for i in range(n)]
    return extended.stages[model]
