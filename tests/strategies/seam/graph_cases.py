"""Cases run by ranks: the number of operations and the exchanges in a train step's graph."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import data
from tfdml.collectives.horovod import HorovodCollective
from tfdml.compression import QSGD, PowerSGD
from tfdml.strategies.replicas.global_step import MetricStep

COMPRESSIONS = {"none": None, "QSGD": QSGD(8), "PowerSGD": PowerSGD(2), "auto": "auto"}


def traced(compression: str, accumulation: int | None = None, scaled: bool = False) -> dict:
    """Returns the contents of one train step's graph.

    Args:
        compression: One of `COMPRESSIONS`.
        accumulation: Number of steps after which the optimizer updates.
        scaled: Whether the loss is scaled.

    Returns:
        Number of operations, including those of called functions; and the number of exchanges by
        kind and bytes.
    """
    graphs: list[tf.Graph] = []
    exchanges: Counter[str] = Counter()
    call = MetricStep.__call__
    kinds = {n: getattr(HorovodCollective, n) for n in ("all_reduce", "all_gather", "all_to_all")}

    def noting_graph(self: MetricStep, batch: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return call(self, batch)

    def noting(kind: str, original: Callable) -> Callable:
        def exchange(self: HorovodCollective, tensors: Any, name: str) -> Any:
            if not tf.executing_eagerly():
                sent = sum(
                    (t.shape.num_elements() or 0) * t.dtype.size for t in tf.nest.flatten(tensors)
                )
                exchanges[f"{kind} {sent}"] += 1
            return original(self, tensors, name)

        return exchange

    MetricStep.__call__ = noting_graph
    for kind, original in kinds.items():
        setattr(HorovodCollective, kind, noting(kind, original))
    try:
        x, y = data(24)
        with rank_job.strategy(compression=COMPRESSIONS[compression]).scope():
            model = keras.Sequential([layers.Input((6,)), layers.Dense(400), layers.Dense(3)])
            optimizer = keras.optimizers.SGD(
                0.01, momentum=0.9, gradient_accumulation_steps=accumulation
            )
            if scaled:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, metrics=["accuracy"])
        model.fit(x, y, batch_size=12, verbose=0)
    finally:
        MetricStep.__call__ = call
        for kind, original in kinds.items():
            setattr(HorovodCollective, kind, original)
    (graph,) = graphs
    definition = graph.as_graph_def()
    inner = sum(len(function.node_def) for function in definition.library.function)
    return {"operations": len(definition.node) + inner, "exchanges": dict(exchanges)}
