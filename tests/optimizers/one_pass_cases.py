"""Cases run by ranks: training with updates in one pass, and with Keras's own operations."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import data
from tfdml.strategies.keras_seam.step import one_pass_updates
from tfdml.strategies.replicas.global_step import MetricStep

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.05, 20), momentum=0.9, nesterov=True
    ),
    "Adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=4),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
}
ONE_PASS = ("TfdmlAdam", "ResourceApplyKerasMomentum", "ResourceApplyGradientDescent")


@contextlib.contextmanager
def _noted_graphs() -> Iterator[list[tf.Graph]]:
    """Context manager: gives the list of the graphs of train steps traced in it."""
    graphs: list[tf.Graph] = []
    call = MetricStep.__call__

    @tf.autograph.experimental.do_not_convert
    def noting_graph(self: MetricStep, batch: object) -> object:
        graphs.append(tf.compat.v1.get_default_graph())
        return call(self, batch)

    with mock.patch.object(MetricStep, "__call__", noting_graph):
        yield graphs


def trained(optimizer: str, in_one_pass: bool, dtype: str = "float32", **options: object) -> dict:
    """Trains a model with dense gradients and those of an embedding.

    Args:
        optimizer: One of `OPTIMIZERS`.
        in_one_pass: Whether updates may be made in one pass.
        dtype: The model's dtype policy; with "mixed_float16" the loss is scaled and overflows.
        **options: Arguments of the strategy.

    Returns:
        The bytes of all variables of the model and its optimizer; and the number of updates in one
        pass in the step's graph.
    """
    x, y = data(33)
    with (
        _noted_graphs() as graphs,
        contextlib.nullcontext()
        if in_one_pass
        else mock.patch.object(one_pass_updates, "is_of_replicas", return_value=False),
        rank_job.strategy(**options).scope(),
    ):
        keras.utils.set_random_seed(3)
        inputs = layers.Input((6,), dtype="float32")
        ids = layers.Lambda(lambda x: tf.cast(tf.abs(x[:, 0]) * 100, tf.int32) % 7)(inputs)
        both = [layers.Dense(67, dtype=dtype)(inputs), layers.Embedding(7, 3, dtype=dtype)(ids)]
        outputs = layers.Dense(5, dtype=dtype)(layers.Concatenate(dtype=dtype)(both))
        model = keras.Model(inputs, outputs)
        own = OPTIMIZERS[optimizer]()
        if dtype == "mixed_float16":
            own = keras.optimizers.LossScaleOptimizer(own, initial_scale=2.0**20)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(own, loss)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return {
        "values": [v.numpy().tobytes() for v in [*model.variables, *own.variables]],
        "one pass": sum(_operations(graph)[name] for graph in graphs for name in ONE_PASS),
    }


def awaited_exchanges() -> list[int]:
    """Returns the number of buckets whose sums each kernel's update waits for.

    The gradients make up two buckets: the last kernel's, and the others'.
    """
    x = np.ones((8, 600), "float32")
    with (
        _noted_graphs() as graphs,
        rank_job.strategy().scope(),
    ):
        model = keras.Sequential([layers.Input((600,)), *(layers.Dense(600) for _ in range(3))])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(x, x, batch_size=8, verbose=0)
    (graph,) = graphs
    updates = [
        operation
        for operation in graph.get_operations()
        if operation.type == "ResourceApplyKerasMomentum" and operation.inputs[3].shape.rank == 2
    ]
    return sorted(_buckets_before(update) for update in updates)


def _buckets_before(operation: tf.Operation) -> int:
    seen: set[str] = set()
    left, buckets = [operation], 0
    while left:
        current = left.pop()
        if current.name in seen:
            continue
        seen.add(current.name)
        buckets += "bucket_" in current.name and "Allreduce" in current.type
        left += [tensor.op for tensor in current.inputs] + list(current.control_inputs)
    return buckets


def _operations(graph: tf.Graph) -> Counter[str]:
    definition = graph.as_graph_def()
    inner = (node for function in definition.library.function for node in function.node_def)
    return Counter(node.op for node in [*definition.node, *inner])
