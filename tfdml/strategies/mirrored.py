"""`MirroredStrategy`: `model.fit` on several GPUs of one machine, in one process."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml import topology
from tfdml.aggregation import RobustRule
from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.collectives.collective import LocalCollective
from tfdml.collectives.device_group import device_group
from tfdml.compression import Auto, Compressor
from tfdml.pipeline.device_groups import flat_devices, grouped_like
from tfdml.pipeline.parallel import PipelineParallel
from tfdml.runtime.gpus import own_devices
from tfdml.strategies import arguments, keras_seam
from tfdml.strategies.replica_strategy import ReplicaStrategy


class MirroredStrategy(ReplicaStrategy):
    """Synchronous training on several devices of this machine, in a strategy scope.

    Replaces `tf.distribute.MirroredStrategy`, which with Keras 3 weights uneven batches wrongly,
    clips gradients before summing them, and lets one replica's float16 overflow reach the weights.
    Losses, metrics and weights are those of training on one device. Does not need Horovod.

    Args:
        devices: Device names, such as `["GPU:0", "GPU:1"]`; by default all GPUs, or one CPU if
            there are none. Other GPUs are not touched if the strategy is created before
            TensorFlow's first operation.
        cross_device_ops: TensorFlow's all-reduce for gradients between the devices, such as
            `tf.distribute.NcclAllReduce()`. By default GPUs use an NCCL all-reduce; CPUs divide
            the layers among themselves, and each sums the gradients of its layers for all.
        compression: Compressor of the gradients between devices: one of `tfdml.compression`, such
            as `PowerSGD(rank=4)`, or its name. Each device then acts like a process of the other
            strategies, which shows on one machine how a codec affects training. "auto" does not
            compress, because there is no network between devices.
        bucket_bytes: Size in bytes of the gradient buckets that a device sums as soon as they are
            complete. A gradient is never split.
        batch_split: Parts of every global batch that the replicas work on: a positive number for
            each, in the order of `devices`, such as `[3, 1]`; or "auto", which measures each
            replica's time per row and gives faster ones more rows, in new parts from the next
            epoch on. The numbers of a training do not depend on them. None for equal parts.
        gradient_aggregation: Rule that combines the devices' gradients so that a few wrong ones do
            little: `tfdml.aggregation.TrimmedMean(num_byzantine=1)` or
            `CenteredClipping(radius, momentum)`. None for the mean.
        pipeline: Division of models into stages on several devices:
            `tfdml.PipelineParallel(num_microbatches=8)`. Then `devices` are groups of them, such as
            `[["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"]]`: each group is one replica. None for whole
            models on each device.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        *,
        compression: Compressor | str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        batch_split: Sequence[float] | str | None = None,
        gradient_aggregation: RobustRule | None = None,
        pipeline: PipelineParallel | None = None,
    ):
        options = arguments.check(
            devices,
            compression,
            bucket_bytes=bucket_bytes,
            batch_split=batch_split,
            gradient_aggregation=gradient_aggregation,
            pipeline=pipeline,
        )
        devices = keras_seam.devices_of_run(devices)
        own = own_devices(flat_devices(devices), topology.on_this_host())
        devices = grouped_like(own, devices)
        _check_cross_device_ops(cross_device_ops, options, len(devices))
        super().__init__(LocalCollective(), devices, options)
        choice = self.extended.aggregator_choice
        choice.cross_device_ops = cross_device_ops
        communication = tf.distribute.experimental.CommunicationOptions()
        choice.device_group = device_group(
            topology.Topology(), self.extended.local_devices, communication
        )
        # Between devices there is no network whose speed could decide.
        choice.compresses_between_devices = not isinstance(options.compression, Auto)


def _check_cross_device_ops(
    cross_device_ops: tf.distribute.CrossDeviceOps | None,
    options: arguments.ReplicaOptions,
    num_devices: int,
) -> None:
    if not isinstance(cross_device_ops, tf.distribute.CrossDeviceOps | None):
        raise ValueError(
            f"`cross_device_ops` must be a `tf.distribute.CrossDeviceOps`, or None. Received: "
            f"cross_device_ops={cross_device_ops!r}. Use for example "
            f"`tf.distribute.HierarchicalCopyAllReduce()`; compressors are passed by "
            f"`compression=...`."
        )
    for name in ("compression", "gradient_aggregation"):
        if cross_device_ops is not None and getattr(options, name) is not None:
            raise ValueError(
                f"`cross_device_ops` must be None with `{name}`, which exchanges gradients itself. "
                f"Received: cross_device_ops={cross_device_ops!r}, "
                f"{name}={getattr(options, name)!r}. Leave one of them out."
            )
    hierarchical = isinstance(cross_device_ops, tf.distribute.HierarchicalCopyAllReduce)
    if hierarchical and num_devices > 1 and num_devices % 2:
        raise ValueError(
            f"`cross_device_ops` must not be a HierarchicalCopyAllReduce with an odd number of "
            f"devices, because TensorFlow leaves one of them out of the sums. Received: "
            f"{num_devices} devices. Leave it out, or use `tf.distribute.NcclAllReduce()`."
        )
