"""Cases: collective operations and compression between the devices of one process."""

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tests.compression.aggregate import aggregate
from tests.harness import rank_job
from tfdml.strategies.aggregation.device_aggregator import DeviceCollective


def operations() -> dict[str, list]:
    """Returns each device's result of each operation in a graph, and whether it is there."""
    strategy = rank_job.strategy()
    devices = strategy.extended.local_devices
    collectives = [DeviceCollective(devices, rank) for rank in range(len(devices))]

    elsewhere = []

    def in_replica() -> dict[str, tf.Tensor]:
        rank = tf.distribute.get_replica_context()._local_replica_id
        own = collectives[rank]
        row = tf.range(own.size, dtype=tf.int32) + 10 * rank
        found = {
            "all_reduce": own.all_reduce([row, row[:1]], "a")[0],
            "all_gather": own.all_gather(tf.fill([rank + 1], rank), "b"),
            "all_to_all": own.all_to_all(row, "c"),
            "broadcast": own.broadcast(row, "d", root=1),
        }
        # The device chosen by the graph; a function's results may be on any device.
        elsewhere.extend(n for n, t in found.items() if not _is_on(t.device, devices[rank]))
        return found

    function = tf.function(lambda: strategy.run(in_replica), autograph=False)
    found = function()
    graph = function.get_concrete_function().graph
    on = {
        kind: sorted({op.device[-5:] for op in graph.get_operations() if op.type == kind})
        for kind in ("Unpack", "AddN")
    }
    results = {name: strategy.experimental_local_results(v) for name, v in found.items()}
    numbers = {name: [t.numpy().tolist() for t in v] for name, v in results.items()}
    return numbers | {"elsewhere": elsewhere, "on": on}


def _is_on(name: str, device: str) -> bool:
    return tf.DeviceSpec.from_string(name).device_index == int(device.rpartition(":")[2])


def state_after(compressor: tfdml.compression.Compressor, before: list[dict] | None) -> list[dict]:
    """Returns a strategy's state after a step on zero gradients, resumed from `before`."""
    strategy = rank_job.strategy(compression=compressor)
    optimizer = keras.optimizers.SGD()
    aggregator = strategy.extended.get_aggregator(optimizer)
    if before is not None:
        aggregator.restore(before)
    rng = np.random.default_rng(rank_job.rank())
    zeros = before is not None

    def in_replica() -> list:
        gradient = np.zeros((40, 50)) if zeros else rng.normal(size=(40, 50))
        return aggregate(aggregator, [tf.constant(gradient, tf.float32)], ["kernel"], "g")

    if isinstance(strategy, tfdml.MirroredStrategy):
        (sums,) = strategy.run(in_replica)
        sums = strategy.experimental_local_results(sums)
    else:
        sums = in_replica()
    return {
        "sums": [s.numpy() for s in sums],
        "state": {name: v.numpy() for name, v in aggregator.state.items()},
        "placement": {name: v.device[-5:] for name, v in aggregator.state.items()},
    }
