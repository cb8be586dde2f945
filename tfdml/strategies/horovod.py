"""`HorovodStrategy`: `model.fit` on the processes that `horovodrun` starts."""

from collections.abc import Sequence

from tfdml import topology
from tfdml.aggregation import RobustRule
from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.collectives.horovod import HorovodCollective
from tfdml.compression import Compressor
from tfdml.local_updates import LocalUpdates
from tfdml.pipeline.device_groups import flat_devices, grouped_like
from tfdml.pipeline.parallel import PipelineParallel
from tfdml.runtime.gpus import own_devices
from tfdml.strategies import arguments
from tfdml.strategies.replica_strategy import ReplicaStrategy
from tfdml.strategies.sharding import Sharding


class HorovodStrategy(ReplicaStrategy):
    """Synchronous training over Horovod's all-reduce, in a strategy scope.

    ```python
    strategy = tfdml.HorovodStrategy()
    with strategy.scope():
        model = build()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=256, epochs=10)
    ```

    Start it with `horovodrun -np 4 python train.py`; without a launcher the same script runs in
    one process. Losses, metrics and weights are those of one process, for any number of processes.

    Differences from `hvd.DistributedOptimizer`:

    - **A batch is global.** `batch_size=256`, or a dataset batched by 256, is 256 rows for all
      processes together; each works on its own part of every batch. Do not shard the dataset by
      rank, and do not multiply the learning rate by `size` unless you multiplied the batch size.
    - Every process reads all data, in the same order: give `Dataset.shuffle` a seed.
    - There is nothing to broadcast, wrap or average: initial weights come from rank 0, metrics are
      those of all data, and only rank 0 shows a progress bar.

    Args:
        devices: This process's devices, such as `["GPU:0", "GPU:1"]`, with one replica on each. By
            default the GPU of this process's local rank, or the CPU if there is none. Other GPUs
            are not touched if the strategy is created before TensorFlow's first operation.
        compression: Compressor of the exchanged gradients: one of `tfdml.compression`, such as
            `PowerSGD(rank=4)`, or its name, such as "powersgd". None for no compression.
        silence_limit: Seconds without a sign of life after which a process is taken for lost and
            the job ends on all processes. A process that dies is noticed at once.
        check_desync: Number of steps between comparisons of all weights across processes; 0 for
            never. Each comparison reads the weights and costs one small exchange.
        bucket_bytes: Size in bytes of the gradient buckets, sent as soon as they are complete.
            Larger buckets mean fewer exchanges, smaller ones an earlier start. A gradient is never
            split.
        batch_split: Parts of every global batch that the replicas work on: a positive number for
            each, in the order of processes and their devices, such as `[3, 1]`; or "auto", which
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
        gradient_aggregation: Rule that combines the ranks' gradients so that a few wrong ones do
            little: `tfdml.aggregation.TrimmedMean(num_byzantine=1)` or
            `CenteredClipping(radius, momentum)`. In a single process its devices are the ranks.
            None for the mean.
        pipeline: Division of models into stages on several devices:
            `tfdml.PipelineParallel(num_microbatches=8)`. Then `devices` are groups of them, such as
            `[["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"]]`: each group is one replica. None for whole
            models on each device.

    Raises:
        ImportError: If a launcher started several processes and Horovod is not installed.
        ValueError: If an argument is wrong, or this host has fewer GPUs than processes.

    Reference:
        Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
        arXiv:1802.05799.
    """

    def __init__(
        self,
        devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        compression: Compressor | str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        batch_split: Sequence[float] | str | None = None,
        local_updates: LocalUpdates | None = None,
        gradient_aggregation: RobustRule | None = None,
        pipeline: PipelineParallel | None = None,
        sharding: Sharding | None = None,
        silence_limit: float = 60.0,
        check_desync: int = 0,
    ):
        options = arguments.check(
            devices,
            compression,
            silence_limit=silence_limit,
            check_desync=check_desync,
            bucket_bytes=bucket_bytes,
            batch_split=batch_split,
            sharding=sharding,
            local_updates=local_updates,
            gradient_aggregation=gradient_aggregation,
            pipeline=pipeline,
        )
        if local_updates is not None and local_updates.synchronous_hosts:
            raise ValueError(
                f"`local_updates` must not have `synchronous_hosts` with `HorovodStrategy`, "
                f"because Horovod agrees with all ranks on each exchange, also within a host. "
                f"Received: local_updates={local_updates!r}. Start one process on each host, with "
                f"the host's GPUs as its `devices`, or use `MultiWorkerMirroredStrategy`."
            )
        if topology.is_elastic() and isinstance(options.batch_split, tuple):
            raise ValueError(
                f"`batch_split` must be 'auto' or None in an elastic job, because the number of "
                f"processes changes. Received: batch_split={batch_split!r}. Use 'auto'."
            )
        if topology.is_elastic() and sharding is not None and sharding.embeddings:
            raise ValueError(
                f"`sharding` must not have `embeddings` in an elastic job, because the rows of a "
                f"process that is lost are lost with it. Received: sharding={sharding!r}. Start "
                f"the job without --min-np, with `FaultTolerantCheckpoint`, or leave out "
                f"`embeddings`."
            )
        collective = _collective()
        own = own_devices(flat_devices(devices), topology.launched(), most=1)
        super().__init__(collective, grouped_like(own, devices), options)
        self.extended.must_join = topology.is_elastic()


def _collective() -> Collective:
    if topology.is_elastic():
        return LocalCollective()  # `tfdml.elastic.run` connects the ranks later.
    return HorovodCollective() if topology.launched().size > 1 else LocalCollective()
