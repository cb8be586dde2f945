"""Cases: transfers between the devices of a process in the graph of one train step."""

from collections import Counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import outcome
from tfdml.collectives.device_group import DeviceGroup
from tfdml.strategies.replicas.global_step import MetricStep
from tfdml.topology import Topology

WIDTH, LAYERS = 64, 8
GRADIENT_BYTES = LAYERS * WIDTH * WIDTH * 4
# A bucket for each layer.
BUCKET_BYTES = WIDTH * WIDTH * 4
Options = tf.distribute.experimental.CommunicationOptions
Implementation = tf.distribute.experimental.CommunicationImplementation


def strategy_with(devices: int, as_group: bool, **options: Any) -> tf.distribute.Strategy:
    """Returns a strategy of the job's kind.

    Args:
        devices: Number of devices of a process.
        as_group: Whether all devices are one group of TensorFlow's ring, as GPUs are.
        **options: Arguments of the constructor.
    """
    if as_group and rank_job.KIND == "multi_worker":
        options["communication_options"] = Options(implementation=Implementation.RING)
    strategy = rank_job.strategy(devices=devices, **options)
    if as_group and rank_job.KIND == "mirrored":
        ring = Options(implementation=Implementation.RING)
        strategy.extended.aggregator_choice.device_group = DeviceGroup(
            Topology(), strategy.extended.local_devices, ring
        )
    return strategy


def of_a_step(devices: int, as_group: bool, compression: Any = None) -> dict[str, Any]:
    """Traces a train step.

    Args:
        devices: Number of devices of a process.
        as_group: Whether all devices are one group.
        compression: Compression of the strategy.

    Returns:
        Bytes that each device receives from others of its process, and sends; bytes passed to
        collective operations; and the operations without a device that take an input as large as
        a gradient.
    """
    strategy = strategy_with(devices, as_group, compression=compression, bucket_bytes=BUCKET_BYTES)
    graphs: list[tf.Graph] = []
    call = MetricStep.__call__

    def noting_graph(self: MetricStep, batch: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return call(self, batch)

    MetricStep.__call__ = noting_graph
    try:
        with strategy.scope():
            dense = [layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
            model = keras.Sequential([layers.Input((WIDTH,)), *dense])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        rows = np.ones((8, WIDTH), "float32")
        model.fit(rows, rows, batch_size=8, verbose=0)
    finally:
        MetricStep.__call__ = call
    return _traffic(graphs[-1])


def state_shapes(devices: int) -> dict[str, list[int]]:
    """Returns the state of a compressing strategy after a step: shapes by name.

    Args:
        devices: Number of devices of a process.
    """
    strategy = rank_job.strategy(devices=devices, compression="onebit", bucket_bytes=BUCKET_BYTES)
    with strategy.scope():
        dense = [layers.Dense(WIDTH, name=f"dense_{i}") for i in range(3)]
        model = keras.Sequential([layers.Input((WIDTH,)), *dense])
        model.compile(keras.optimizers.SGD(0.1, name="sgd"), "mse")
    rows = np.ones((8, WIDTH), "float32")
    model.fit(rows, rows, batch_size=8, verbose=0)
    aggregator = strategy.extended.get_aggregator(model.optimizer)
    return {name: v.shape.as_list() for name, v in aggregator.state.items()}


def _traffic(graph: tf.Graph) -> dict[str, Any]:
    received, sent, exchanged, nowhere = Counter(), Counter(), Counter(), []
    copies = set()
    for operation in graph.get_operations():
        here = _device(operation)
        for tensor in operation.inputs:
            there, size = _device(tensor.op), _nbytes(tensor)
            if operation.type == "CollectiveReduceV2" and tensor.dtype != tf.resource:
                exchanged[here] += size
            # Reads and updates of a variable are on the variable's device.
            if size < BUCKET_BYTES // 8 or _of_variable(operation) or _of_variable(tensor.op):
                continue
            if not here or not there:
                nowhere.append(operation.name)
            elif here != there and (tensor.ref(), here) not in copies:
                copies.add((tensor.ref(), here))
                received[here] += size
                sent[there] += size
    return {
        "received": dict(received),
        "sent": dict(sent),
        "exchanged": dict(exchanged),
        "nowhere": nowhere,
    }


def _of_variable(operation: tf.Operation) -> bool:
    if operation.type == "CollectiveReduceV2":
        return False
    return any(t.dtype == tf.resource for t in operation.inputs)


def _device(operation: tf.Operation) -> str:
    return operation.device.rpartition("/device:")[2]


def _nbytes(tensor: tf.Tensor) -> int:
    if tensor.dtype in (tf.resource, tf.variant):
        return 0
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def trained(devices: int, as_group: bool, eagerly: bool = False, **options: Any) -> dict[str, Any]:
    """Trains on dense and sparse gradients; returns the outcome of `fit`.

    Args:
        devices: Number of devices of a process.
        as_group: Whether all devices are one group.
        eagerly: Whether steps are run eagerly.
        **options: Arguments of the strategy.
    """
    with strategy_with(devices, as_group, **options).scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                layers.Input((5,), dtype="int32"),
                layers.Embedding(50, 8),
                layers.Flatten(),
                layers.Dense(40, "tanh"),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            loss,
            metrics=["accuracy"],
            run_eagerly=eagerly,
        )
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 50, (44, 5)), rng.integers(0, 3, 44)
    history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    # A variable reads as the first device's copy; all copies must be bit-identical.
    identical = all(
        own.numpy().tobytes() == first.numpy().tobytes()
        for variable in [*model.variables, *model.optimizer.variables]
        for first, *others in [getattr(variable.value, "values", [variable.value])]
        for own in others
    )
    return outcome(model, history) | {"identical": identical}
