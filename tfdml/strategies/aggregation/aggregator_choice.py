"""Choice of the way in which a strategy sums an optimizer's gradients."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import GradientAggregator
from tfdml.collectives.collective import Collective
from tfdml.collectives.device_group import DeviceGroup
from tfdml.collectives.hosts import Hosts
from tfdml.collectives.observed_collective import ExchangeListener, ObservedExchange
from tfdml.compression.auto.auto_aggregator import make_aggregator
from tfdml.compression.auto.sent_bytes import SentBytes
from tfdml.compression.compressor import Compressor
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.strategies.aggregation.cross_device_aggregator import CrossDeviceAggregator
from tfdml.strategies.aggregation.device_aggregator import DeviceAggregator
from tfdml.strategies.aggregation.device_group_aggregator import DeviceGroupAggregator
from tfdml.strategies.aggregation.robust_aggregator import RobustAggregator
from tfdml.strategies.arguments import ReplicaOptions


class AggregatorChoice:
    """Creates the aggregators of a strategy's optimizers.

    A strategy's constructor sets the attributes.

    Attributes:
        cross_device_ops: TensorFlow's all-reduce between devices that the user has asked for.
        device_group: Group of all devices, if it sums faster than `spread` does.
        compresses_between_devices: Whether gradients are compressed between the devices of a
            single process.
        hosts: Hosts and their ranks; None for a single process.

    Args:
        devices: This process's devices.
        listeners: Listeners to the exchanges of the device group.
    """

    def __init__(self, devices: Sequence[str], listeners: Sequence[ExchangeListener]):
        self.cross_device_ops: tf.distribute.CrossDeviceOps | None = None
        self.device_group: DeviceGroup | None = None
        self.compresses_between_devices = False
        self.hosts: Hosts | None = None
        self._devices = devices
        self._listeners = listeners

    def compresses(self, collective: Collective, options: ReplicaOptions) -> bool:
        """Returns whether gradients are compressed; a single sender has nothing to send.

        Args:
            collective: Collective between the processes.
            options: The strategy's options.
        """
        several = len(self._devices) if self.compresses_between_devices else collective.size
        return options.compression is not None and several > 1

    def make(self, collective: Collective, options: ReplicaOptions) -> GradientAggregator:
        """Creates an optimizer's aggregator.

        Args:
            collective: Collective between the processes.
            options: The strategy's options.
        """
        bucket_bytes = options.bucket_bytes
        compressor = options.compression if self.compresses(collective, options) else None
        if options.gradient_aggregation is not None:
            return self._make_robust(collective, compressor, options)
        if options.shards_optimizers and collective.size > 1:
            return make_aggregator(collective, compressor, bucket_bytes, to_owners=True)
        if self.cross_device_ops is not None:
            return CrossDeviceAggregator(self.cross_device_ops)
        if compressor is not None and self.compresses_between_devices:
            make = functools.partial(
                CompressedAggregator, compressor=compressor, bucket_bytes=bucket_bytes
            )
            return DeviceAggregator(self._devices, make)
        # The group has one device of each replica; those of a pipeline's stages are others.
        is_group = self.device_group is not None and options.pipeline is None
        if compressor is None and is_group:
            return DeviceGroupAggregator(self._exchange, collective, bucket_bytes)
        return make_aggregator(collective, compressor, bucket_bytes, self.hosts)

    def _make_robust(
        self, collective: Collective, compressor: Compressor | None, options: ReplicaOptions
    ) -> GradientAggregator:
        """Creates an aggregator between processes, or between the devices of a single one."""
        make = functools.partial(
            RobustAggregator,
            rule=options.gradient_aggregation,
            bucket_bytes=options.bucket_bytes,
            compressor=compressor,
        )
        between_devices = collective.size == 1 and len(self._devices) > 1
        return DeviceAggregator(self._devices, make) if between_devices else make(collective)

    def make_local(self, collective: Collective, options: ReplicaOptions) -> GradientAggregator:
        """Creates the aggregator of a local step: it sums without compression, and keeps nothing.

        Args:
            collective: Collective between the processes that take the step together.
            options: The strategy's options.
        """
        return make_aggregator(collective, None, options.bucket_bytes)

    def _exchange(self, name: str, parts: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Sums each device's tensors over the device group."""

        def move(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            own = tf.nest.pack_sequence_as(parts, tensors)
            return tf.nest.flatten(self.device_group.all_reduce(own, name))

        exchange = ObservedExchange("all_reduce", name, tf.nest.flatten(parts))
        return tf.nest.pack_sequence_as(parts, exchange.make(move, self._listeners))

    def sent_bytes(self, collective: Collective, options: ReplicaOptions) -> SentBytes:
        """Returns the arithmetic of the bytes that a rank sends by these aggregators.

        Args:
            collective: Collective between the processes.
            options: The strategy's options.
        """
        compressor = options.compression if self.compresses(collective, options) else None
        is_robust = options.gradient_aggregation is not None
        to_owners = options.shards_optimizers and collective.size > 1 and not is_robust
        hosts = None if to_owners or is_robust else self.hosts
        return SentBytes(collective.size, compressor, options.bucket_bytes, hosts, to_owners)
