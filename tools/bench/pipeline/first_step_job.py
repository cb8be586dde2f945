"""Job of `tools.bench.pipeline` that measures the time until a step of many stages has run."""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tools.bench.harness import report
from tools.bench.pipeline import keras_models
from tools.bench.pipeline.sizes import Sizes


class CountingAdam(keras.optimizers.Adam):
    """Adam that notes the operations of the graph whenever gradients are there.

    In a pipeline that is after each microbatch; the update is made later.

    Attributes:
        operations: Number of operations of the forward and backward passes of all microbatches.
    """

    operations = 0

    def apply(self, grads, trainable_variables=None):
        """Notes the operations, and updates."""
        operations = tf.compat.v1.get_default_graph().get_operations()
        self.operations = max(self.operations, len(operations))
        super().apply(grads, trainable_variables)


def main(stages: int, microbatches: int, blocks: int, width: int) -> None:
    """Trains a transformer for a step, and reports seconds and operations."""
    (device,) = tf.config.list_physical_devices("CPU")
    own = [tf.config.LogicalDeviceConfiguration()] * stages
    tf.config.set_logical_device_configuration(device, own)
    sizes = Sizes(blocks, width, 2 * microbatches, 16)
    pipeline = tfdml.PipelineParallel(microbatches)
    devices = [[f"CPU:{number}" for number in range(stages)]]
    optimizer = CountingAdam()
    with tfdml.MirroredStrategy(devices=devices, pipeline=pipeline).scope():
        model = keras_models.build(sizes, "transformer")
        model.compile(optimizer, keras_models.loss_of(sizes))
    x, y = map(np.asarray, keras_models.batch(sizes))
    begin = time.perf_counter()
    model.fit(x, y, batch_size=sizes.rows, verbose=0)
    report({"seconds": time.perf_counter() - begin, "operations": optimizer.operations})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("microbatches", type=int, help="Microbatches of a step.")
    parser.add_argument("--stages", type=int, default=8, help="Stages.")
    parser.add_argument("--blocks", type=int, default=8, help="Blocks of the transformer.")
    parser.add_argument("--width", type=int, default=128, help="Its width.")
    main(**vars(parser.parse_args()))
