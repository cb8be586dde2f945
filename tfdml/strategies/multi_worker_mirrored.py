"""`MultiWorkerMirroredStrategy`: `model.fit` on the workers of a TensorFlow cluster."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml import topology
from tfdml.aggregation import RobustRule
from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.collectives.collective import LocalCollective
from tfdml.collectives.device_group import device_group
from tfdml.collectives.tensorflow import TensorFlowCollective
from tfdml.compression import Compressor
from tfdml.local_updates import LocalUpdates
from tfdml.pipeline.device_groups import each_device, flat_devices, grouped_like, replica_devices
from tfdml.pipeline.parallel import PipelineParallel
from tfdml.runtime.gpus import own_devices
from tfdml.strategies import arguments
from tfdml.strategies.cluster_member import join
from tfdml.strategies.replica_strategy import ReplicaStrategy
from tfdml.strategies.sharding import Sharding


class MultiWorkerMirroredStrategy(ReplicaStrategy):
    """Synchronous training on the workers of a TensorFlow cluster, in a strategy scope.

    Replaces `tf.distribute.MultiWorkerMirroredStrategy`, whose `fit` crashes with Keras 3. Does
    not need Horovod. Start the same script on every machine with its `TF_CONFIG`, or pass a
    resolver (Slurm, Kubernetes, ...); without either it runs on this machine alone. Create the
    strategy at the start of the program: TensorFlow must start its server before its first
    operation.

    As with `tfdml.HorovodStrategy`, a batch is global, initial weights are rank 0's, and losses,
    metrics and weights are those of one process.

    Args:
        cluster_resolver: Resolver that describes the cluster and this process's task; reads
            `TF_CONFIG` by default. The chief, or else worker 0, is rank 0.
        communication_options: A `tf.distribute.experimental.CommunicationOptions`: the
            implementation (`AUTO`, `RING` or `NCCL`) and a time limit for a collective. Its
            `bytes_per_pack` sets `bucket_bytes`, unless that is given too.
        devices: This process's devices; by default all its GPUs, or one CPU if there are none.
            Workers that `tfdml launch` starts on one host divide its GPUs among themselves. Other
            GPUs are not touched.
        compression: Compressor of the exchanged gradients: one of `tfdml.compression`, such as
            `PowerSGD(rank=4)`, or its name, such as "powersgd". None for no compression.
        silence_limit: Seconds without a sign of life after which a process is taken for lost and
            the job ends on all processes. A process that dies is noticed at once.
        start_limit: Seconds to wait for the other processes to start.
        check_desync: Number of steps between comparisons of all weights across processes; 0 for
            never.
        bucket_bytes: Size in bytes of the gradient buckets, sent as soon as they are complete.
            Larger buckets mean fewer exchanges, smaller ones an earlier start. A gradient is never
            split.
        batch_split: Parts of every global batch that the replicas work on: a positive number for
            each, in the order of workers and their devices, such as `[3, 1]`; or "auto", which
            measures each replica's time per row and gives faster ones more rows, in new parts from
            the next epoch on. The numbers of a training do not depend on them. None for equal
            parts.
        local_updates: Method by which each rank takes steps of its own between synchronizations:
            `tfdml.local_updates.LocalSGD(sync_every=16)` or `DiLoCo(sync_every=100)`. Compression
            then applies to what is exchanged at synchronizations. None for synchronous steps, whose
            numbers do not depend on the number of processes.
        sharding: Division of optimizer state among the processes, so that each of N keeps 1/N of
            the slots: `tfdml.Sharding(optimizer_state=True)`; with `embeddings=True` of large
            embedding tables, too. None for no division.
        gradient_aggregation: Rule that combines the workers' gradients so that a few wrong ones do
            little: `tfdml.aggregation.TrimmedMean(num_byzantine=1)` or
            `CenteredClipping(radius, momentum)`. In a single process its devices are the workers.
            None for the mean.
        pipeline: Division of models into stages on several devices:
            `tfdml.PipelineParallel(num_microbatches=8)`. Then `devices` are groups of them, such as
            `[["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"]]`: each group is one replica. None for whole
            models on each device.

    Raises:
        ValueError: If an argument is wrong, or the cluster does not name this process's task.
        OSError: If this process's port is taken.
        TimeoutError: If another process does not start in time.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        compression: Compressor | str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        batch_split: Sequence[float] | str | None = None,
        local_updates: LocalUpdates | None = None,
        gradient_aggregation: RobustRule | None = None,
        pipeline: PipelineParallel | None = None,
        sharding: Sharding | None = None,
        silence_limit: float = 60.0,
        check_desync: int = 0,
        start_limit: float = 300.0,
    ):
        communication_options = (
            communication_options or tf.distribute.experimental.CommunicationOptions()
        )
        if communication_options.bytes_per_pack and bucket_bytes == BUCKET_BYTES:
            bucket_bytes = communication_options.bytes_per_pack
        implementation = communication_options.implementation.name
        options = arguments.check(
            devices,
            compression,
            silence_limit=silence_limit,
            check_desync=check_desync,
            bucket_bytes=bucket_bytes,
            communication_options=f"{implementation} {communication_options.timeout_seconds}",
            batch_split=batch_split,
            sharding=sharding,
            local_updates=local_updates,
            gradient_aggregation=gradient_aggregation,
            pipeline=pipeline,
        )
        arguments.check_seconds("start_limit", start_limit)
        self._cluster_resolver = (
            cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        )
        # Slurm's resolver selects this process's GPUs here, and the server then takes them.
        self._cluster_resolver.cluster_spec()
        own = grouped_like(own_devices(flat_devices(devices), topology.on_this_host()), devices)
        member = join(cluster_resolver, communication_options, start_limit)
        if member is None:
            super().__init__(LocalCollective(), own, options)
            self.extended.aggregator_choice.device_group = device_group(
                topology.Topology(), self.extended.local_devices, communication_options
            )
            return
        # In a cluster, device names include the job and task.
        task = member.devices[0].rsplit("/device:", 1)[0]
        own = each_device(lambda device: f"{task}/device:{device}", own)
        firsts = replica_devices(own)
        collective = TensorFlowCollective(member.topology, firsts, communication_options)
        super().__init__(collective, own, options)
        self.extended.aggregator_choice.device_group = device_group(
            member.topology, firsts, communication_options
        )

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that describes the cluster."""
        return self._cluster_resolver
