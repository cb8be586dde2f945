"""Checks what is sent to workers for them to read data themselves."""

import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2

from tfdml.strategies.parameter_server.remote_datasets import ShippedDataset


def test_a_worker_frees_an_iterator_without_waiting_for_the_autotuner():
    """The autotuner may sleep for a minute, in which the worker, and so the chief, stands still."""
    data = tf.data.Dataset.range(10).map(lambda x: x + 1, num_parallel_calls=tf.data.AUTOTUNE)
    asked = tf.data.Options()
    asked.autotune.enabled = True
    shipped = ShippedDataset(data.with_options(asked), None, 2)
    *_, outermost = [
        node for node in shipped._make.graph.as_graph_def().node if node.op == "OptionsDataset"
    ]
    options = dataset_options_pb2.Options.FromString(outermost.attr["serialized_options"].s)
    assert options.autotune_options.enabled is False
    # `AUTOTUNE` then means all cores, and not TensorFlow's 16.
    assert options.autotune_options.initial_parallelism > 1000
