"""The table of combinations: the outcome of each pair of features.

A row has an entry for each feature above it, so a new feature is a new last row with its outcome
for all others. `test_combinations` checks each entry.
"""

import dataclasses

FEATURES = {
    # Codecs: Strategy(compression=...), by what they keep between steps and send.
    "cast": "Float16, BFloat16",
    "quantising": "QSGD, NaturalCompression, TernGrad",
    "sign": "OneBit",
    "sparse": "TopK, RandomK",
    "low_rank": "PowerSGD",
    "momentum": "DeepGradientCompression",
    "auto": "Auto",
    # Arguments of `compile` and `fit`, and their data.
    "accumulation": "gradient_accumulation_steps",
    "loss_scaling": "LossScaleOptimizer",
    "jit": "jit_compile=True",
    "local_devices": "several devices of a process",
    "sharded_input": "AutoShardPolicy.OFF; own shares of read_tfrecords",
    "mixed_data": "read_tfrecords of several data sets",
    "checkpoint_resume": "FaultTolerantCheckpoint",
    "batch_split": "batch_split",
    # Jobs.
    "ps_sync": "ParameterServerStrategy(synchronous=True)",
    "ps_async": "ParameterServerStrategy()",
    "elastic": "tfdml.elastic",
    "hosts": "several processes on each of several hosts",
    # Layers.
    "remat": "tfdml.remat, keras.RematScope",
    # Optimizers.
    "sharding": "Sharding(optimizer_state=True)",
    # Tables.
    "tables": "Sharding(embeddings=True)",
    # Fewer synchronizations.
    "local_updates": "LocalSGD, DiLoCo",
    "synchronous_hosts": "LocalSGD(synchronous_hosts=True)",
    # Several devices for a replica.
    "pipeline": "PipelineParallel",
    # Sums in which a few wrong ranks do little.
    "robust": "TrimmedMean, CenteredClipping",
}
CODECS = ("cast", "quantising", "sign", "sparse", "low_rank", "momentum", "auto")

# The strategies' arguments with their features; "" for arguments that do not change results, or
# that belong to only one strategy.
ARGUMENTS = {
    "devices": "local_devices",
    "compression": "cast",
    "synchronous": "ps_sync",
    "cluster_resolver": "",
    "cross_device_ops": "",
    "communication_options": "",
    "variable_partitioner": "",
    "backup_workers": "",
    "max_staleness": "",
    "batch_split": "batch_split",
    "local_updates": "local_updates",
    "gradient_aggregation": "robust",
    "pipeline": "pipeline",
    "sharding": "sharding",
    "bucket_bytes": "",
    "check_desync": "",
    "silence_limit": "",
    "start_limit": "",
    "restart_limit": "",
}


@dataclasses.dataclass(frozen=True)
class Equal:
    """The pair is trained on two ranks, and equals the training without it.

    With a codec, the reference is the training with the codec alone; if the codec has no peer
    there, as on parameter servers, or encodes but one of two ways, as with sharding, the training
    without a codec, within `rtol` and `atol`.

    Attributes:
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        by_default: Whether the test runs by default; otherwise it is a slow test.
    """

    rtol: float = 1e-5
    atol: float = 2e-6
    by_default: bool = False


@dataclasses.dataclass(frozen=True)
class Refused:
    """The pair raises an error before the first step.

    Attributes:
        message: Part of the error message.
        by_default: As in `Equal`.
    """

    message: str
    by_default: bool = False


@dataclasses.dataclass(frozen=True)
class Apart:
    """The features belong to different jobs: nobody can combine them.

    Attributes:
        why: Reason.
        message: Part of the error message for those who try.
    """

    why: str
    message: str


Outcome = Equal | Refused | Apart

EQUAL = Equal()
SHOWN = Equal(by_default=True)
# Float16 rounds sums over two devices, or over two halves of a batch, in a different order.
ROUNDED = Equal(rtol=1e-3, atol=2e-5)
ONE_CODEC = Refused("`compression` must be a compressor such as", by_default=True)
NOT_ON_WORKERS = Refused("keep no residual for the next step")
NO_XLA_ON_SERVERS = Refused("`jit_compile` must not be True, because XLA cannot read variables")
NO_DEVICES = Apart(
    "a worker has one replica", "__init__() got an unexpected keyword argument 'devices'"
)
NOT_BETWEEN_WORKERS = Apart(
    "workers send to servers, not to one another", "`TF_CONFIG` must describe the cluster"
)
NOT_TO_OWNERS = Refused("`compression` must encode the part of each owner", by_default=True)
NO_SHARDING = Apart(
    "slots are on the servers", "__init__() got an unexpected keyword argument 'sharding'"
)
NO_XLA_AROUND_LOOKUPS = Refused(
    "`jit_compile` must not be True for a model whose replicas exchange"
)
NO_LOOKUPS_IN_BLOCKS = Refused("must not be called in a block of `tfdml.remat`")
NO_LOST_ROWS = Refused("`sharding` must not have `embeddings` in an elastic job")
NO_LOCAL_SLOTS = Refused("`sharding` must be None with `local_updates`", by_default=True)
NO_LOCAL_UPDATES = Apart(
    "each step's gradients go to the servers",
    "__init__() got an unexpected keyword argument 'local_updates'",
)
NO_PIPELINE = Apart(
    "a worker has one replica on one device",
    "__init__() got an unexpected keyword argument 'pipeline'",
)
NO_LOOKUPS_IN_STAGES = Refused("`sharding` must not have `embeddings` with `pipeline`")
NOT_COMPARED = Refused("`compression` must encode all numbers of each rank's gradient")
NO_SERVERS = Apart(
    "`horovodrun` starts ranks, not a cluster", "`TF_CONFIG` must describe the cluster"
)

TABLE: dict[str, dict[str, Outcome]] = {
    "cast": {},
    "quantising": {"cast": ONE_CODEC},
    "sign": {"cast": ONE_CODEC, "quantising": ONE_CODEC},
    "sparse": {"cast": ONE_CODEC, "quantising": ONE_CODEC, "sign": ONE_CODEC},
    "low_rank": {
        "cast": ONE_CODEC,
        "quantising": ONE_CODEC,
        "sign": ONE_CODEC,
        "sparse": ONE_CODEC,
    },
    "momentum": {
        "cast": ONE_CODEC,
        "quantising": ONE_CODEC,
        "sign": ONE_CODEC,
        "sparse": ONE_CODEC,
        "low_rank": ONE_CODEC,
    },
    # The other one is its candidate.
    "auto": {
        "cast": EQUAL,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": Refused("`candidates` must be compressors that can be measured in turns", True),
    },
    "accumulation": {
        "cast": ROUNDED,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": SHOWN,
        "auto": EQUAL,
    },
    "loss_scaling": {
        "cast": EQUAL,
        "quantising": EQUAL,
        "sign": SHOWN,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": SHOWN,
    },
    "jit": {
        "cast": ROUNDED,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
    },
    "local_devices": {
        "cast": ROUNDED,
        "quantising": EQUAL,
        "sign": SHOWN,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
    },
    "sharded_input": {
        "cast": EQUAL,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
    },
    "mixed_data": {
        "cast": EQUAL,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": SHOWN,
    },
    "checkpoint_resume": {
        "cast": EQUAL,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
    },
    # What a codec rounds depends on the parts: with one, they are "auto" and equal in an epoch.
    "batch_split": {
        "cast": EQUAL,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
    },
    "ps_sync": {
        "cast": Equal(rtol=1e-3, atol=5e-5),
        "quantising": Equal(rtol=1e-2, atol=2e-3),
        "sign": NOT_ON_WORKERS,
        "sparse": NOT_ON_WORKERS,
        "low_rank": NOT_ON_WORKERS,
        "momentum": NOT_ON_WORKERS,
        "auto": NOT_ON_WORKERS,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": NO_XLA_ON_SERVERS,
        "local_devices": NO_DEVICES,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
    },
    # On one worker, which takes its steps one after the other.
    "ps_async": {
        "cast": Equal(rtol=1e-3, atol=5e-5),
        "quantising": Equal(rtol=1e-2, atol=2e-3),
        "sign": NOT_ON_WORKERS,
        "sparse": NOT_ON_WORKERS,
        "low_rank": NOT_ON_WORKERS,
        "momentum": NOT_ON_WORKERS,
        "auto": NOT_ON_WORKERS,
        "accumulation": Refused("`gradient_accumulation_steps` must be None in asynchronous"),
        "loss_scaling": EQUAL,
        "jit": NO_XLA_ON_SERVERS,
        "local_devices": NO_DEVICES,
        "sharded_input": EQUAL,
        "mixed_data": Refused("The data must be a `tf.data` pipeline of TensorFlow's own"),
        "checkpoint_resume": EQUAL,
        "batch_split": Refused("`batch_split` must be None without `synchronous=True`"),
        "ps_sync": Apart(
            "`synchronous` is one or the other", "`max_staleness` must be None with `synchronous"
        ),
    },
    # With a codec, a second rank joins; without, it is also lost afterwards.
    "elastic": {
        "cast": ROUNDED,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": NO_SERVERS,
        "ps_async": NO_SERVERS,
    },
    # On two hosts of two ranks, whose sums are those of two ranks; with 4-bit QSGD, or the codec.
    "hosts": {
        "cast": ROUNDED,
        "quantising": SHOWN,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": NOT_BETWEEN_WORKERS,
        "ps_async": NOT_BETWEEN_WORKERS,
        "elastic": EQUAL,
    },
    # In "full" mode: each layer is a block.
    "remat": {
        "cast": ROUNDED,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": SHOWN,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": EQUAL,
        "ps_async": EQUAL,
        "elastic": EQUAL,
        "hosts": EQUAL,
    },
    "sharding": {
        "cast": Equal(rtol=1e-3, atol=5e-5),
        "quantising": Equal(rtol=2e-2, atol=5e-3, by_default=True),
        "sign": Equal(rtol=5e-2, atol=5e-2),
        "sparse": EQUAL,
        "low_rank": NOT_TO_OWNERS,
        "momentum": NOT_TO_OWNERS,
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": SHOWN,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": NO_SHARDING,
        "ps_async": NO_SHARDING,
        "elastic": EQUAL,
        "hosts": EQUAL,
        "remat": EQUAL,
    },
    "tables": {
        "cast": Equal(rtol=1e-3, atol=2e-5),
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": SHOWN,
        "loss_scaling": EQUAL,
        "jit": NO_XLA_AROUND_LOOKUPS,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": NO_SHARDING,
        "ps_async": NO_SHARDING,
        "elastic": NO_LOST_ROWS,
        "hosts": EQUAL,
        "remat": NO_LOOKUPS_IN_BLOCKS,
        "sharding": EQUAL,
    },
    # Local SGD that synchronizes after each step, and averages slots, is synchronous training. What
    # weights move by is rounded: with 4 bits a number near a half may go to the other side.
    "local_updates": {
        "cast": ROUNDED,
        "quantising": Equal(rtol=5e-3, atol=5e-4, by_default=True),
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": Refused("`compression` must not compute the optimizer's momentum", True),
        "auto": EQUAL,
        "accumulation": SHOWN,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": NO_LOCAL_UPDATES,
        "ps_async": NO_LOCAL_UPDATES,
        "elastic": EQUAL,
        "hosts": Equal(rtol=5e-3, atol=5e-4),
        "remat": EQUAL,
        "sharding": NO_LOCAL_SLOTS,
        "tables": NO_LOCAL_SLOTS,
    },
    # On two hosts of two ranks of a cluster, which take the steps of two ranks.
    "synchronous_hosts": {
        "cast": ROUNDED,
        "quantising": Equal(rtol=5e-3, atol=5e-4),
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": Refused("`compression` must not compute the optimizer's momentum"),
        "auto": EQUAL,
        "accumulation": EQUAL,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": NO_LOCAL_UPDATES,
        "ps_async": NO_LOCAL_UPDATES,
        "elastic": Refused("must not have `synchronous_hosts` with `HorovodStrategy`"),
        "hosts": Equal(rtol=5e-3, atol=5e-4),
        "remat": EQUAL,
        "sharding": NO_LOCAL_SLOTS,
        "tables": NO_LOCAL_SLOTS,
        "local_updates": EQUAL,
    },
    # Each process has two stages; with several devices, two groups of two.
    "pipeline": {
        "cast": ROUNDED,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": EQUAL,
        "low_rank": EQUAL,
        "momentum": EQUAL,
        "auto": EQUAL,
        "accumulation": SHOWN,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": NO_PIPELINE,
        "ps_async": NO_PIPELINE,
        "elastic": EQUAL,
        "hosts": EQUAL,
        "remat": EQUAL,
        "sharding": SHOWN,
        "tables": NO_LOOKUPS_IN_STAGES,
        "local_updates": EQUAL,
        "synchronous_hosts": EQUAL,
    },
    # Nothing is trimmed, so the result is the mean.
    "robust": {
        "cast": ROUNDED,
        "quantising": EQUAL,
        "sign": EQUAL,
        "sparse": NOT_COMPARED,
        "low_rank": NOT_COMPARED,
        "momentum": NOT_COMPARED,
        "auto": NOT_COMPARED,
        "accumulation": SHOWN,
        "loss_scaling": EQUAL,
        "jit": EQUAL,
        "local_devices": EQUAL,
        "sharded_input": EQUAL,
        "mixed_data": EQUAL,
        "checkpoint_resume": EQUAL,
        "batch_split": EQUAL,
        "ps_sync": EQUAL,
        "ps_async": Refused("`gradient_aggregation` must be None without `synchronous=True`"),
        "elastic": EQUAL,
        "hosts": EQUAL,
        "remat": EQUAL,
        "sharding": EQUAL,
        "tables": Refused("`sharding` must not have `embeddings` with `gradient_aggregation`"),
        "local_updates": EQUAL,
        "synchronous_hosts": EQUAL,
        "pipeline": EQUAL,
    },
}
