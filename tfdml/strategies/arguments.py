"""Checks of the arguments that the strategies' constructors share."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from tfdml.aggregation import RobustRule
from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.compression import Compressor, DeepGradientCompression, get
from tfdml.compression.auto.auto_aggregator import goes_to_owners
from tfdml.compression.compressor import ChunkCompressor
from tfdml.local_updates import LocalUpdates
from tfdml.pipeline.device_groups import check_device_groups
from tfdml.pipeline.parallel import PipelineParallel
from tfdml.row_split import integer_weights
from tfdml.strategies.sharding import Sharding

# Metadata of a field that may differ between processes. All others must be the same on all.
_OWN = {"own": True}


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """The options of a synchronous strategy, by the names of its constructor's arguments.

    Attributes:
        compression: Compressor of exchanged gradients, None for no compression.
        bucket_bytes: Size of a gradient bucket in bytes.
        check_desync: Steps between two comparisons of all weights; 0 for none.
        communication_options: Options of TensorFlow's collectives, as text.
        batch_split: Integer weights of the replicas' parts of a batch, "auto", or None for equal
            parts.
        silence_limit: Seconds of silence after which another process is taken for lost.
        sharding: Division of optimizer state among the processes; None for no division.
        local_updates: Method of local updates; None if each step is synchronous.
        gradient_aggregation: Rule that combines the ranks' gradients; None for their mean.
        pipeline: Division of models into stages; None for whole models on each device.
    """

    compression: Compressor | None = None
    bucket_bytes: int = BUCKET_BYTES
    check_desync: int = 0
    communication_options: str = ""
    batch_split: tuple[int, ...] | str | None = None
    silence_limit: float = dataclasses.field(default=60.0, metadata=_OWN)
    sharding: Sharding | None = None
    local_updates: LocalUpdates | None = None
    gradient_aggregation: RobustRule | None = None
    pipeline: PipelineParallel | None = None

    @property
    def shards_optimizers(self) -> bool:
        """Whether each process keeps a part of the optimizers' state."""
        return self.sharding is not None and self.sharding.optimizer_state

    @property
    def must_match(self) -> dict[str, Any]:
        """The options that must be the same on all processes, by name."""
        fields = [f.name for f in dataclasses.fields(self) if not f.metadata]
        return {name: getattr(self, name) for name in fields}


def check(
    devices: Sequence[str] | None,
    compression: Compressor | str | None,
    *,
    silence_limit: float = 60.0,
    check_desync: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    communication_options: str = "",
    batch_split: Sequence[float] | str | None = None,
    sharding: Sharding | None = None,
    local_updates: LocalUpdates | None = None,
    gradient_aggregation: RobustRule | None = None,
    pipeline: PipelineParallel | None = None,
) -> ReplicaOptions:
    """Checks the arguments that the strategies share; returns them as options.

    Args:
        devices: Names of this process's devices, or None.
        compression: A compressor, its name, or None.
        silence_limit: Seconds of silence after which another process is taken for lost.
        check_desync: Steps between two comparisons of all weights; 0 for none.
        bucket_bytes: Size of a gradient bucket in bytes.
        communication_options: Options of TensorFlow's collectives, as text.
        batch_split: A positive number for each replica, "auto", or None for equal parts.
        sharding: Division of optimizer state among the processes; None for no division.
        local_updates: Method of local updates; None if each step is synchronous.
        gradient_aggregation: Rule that combines the ranks' gradients; None for their mean.
        pipeline: Division of models into stages; None for whole models on each device.

    Raises:
        ValueError: If an argument is wrong.
    """
    if devices is not None and (isinstance(devices, str) or not devices):
        raise ValueError(
            f"`devices` must be a non-empty list of device names, or None for the default. "
            f"Received: devices={devices!r}. Use for example ['GPU:0']."
        )
    check_device_groups(devices, pipeline)
    check_seconds("silence_limit", silence_limit)
    if not isinstance(check_desync, int) or check_desync < 0:
        raise ValueError(
            f"`check_desync` must be a number of steps, or 0 for no check. Received: "
            f"check_desync={check_desync!r}."
        )
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(
            f"`bucket_bytes` must be a positive number of bytes. Received: "
            f"bucket_bytes={bucket_bytes!r}. Use for example {BUCKET_BYTES}, the default."
        )
    if sharding is not None and not isinstance(sharding, Sharding):
        raise ValueError(
            f"`sharding` must be a `tfdml.Sharding`, or None. Received: sharding={sharding!r}. Use "
            f"for example `tfdml.Sharding(optimizer_state=True)`."
        )
    compressor = get(compression)
    shards = sharding is not None and sharding.optimizer_state
    if shards and not goes_to_owners(compressor):
        raise ValueError(
            f"`compression` must encode the part of each owner on its own with `sharding`. "
            f"Received: compression={compressor!r}, whose sums every rank must have, or which "
            f"computes the optimizer's momentum. Use for example tfdml.compression.QSGD(8), or "
            f"leave out `sharding`."
        )
    if pipeline is not None and sharding is not None and sharding.embeddings:
        raise ValueError(
            f"`sharding` must not have `embeddings` with `pipeline`, because processes exchange "
            f"rows of a table in the middle of a stage, which is a function on its own device. "
            f"Received: sharding={sharding!r}. Leave out `embeddings`: a table is then whole, on "
            f"the device of its stage."
        )
    _check_local_updates(local_updates, compressor, sharding, batch_split)
    _check_gradient_aggregation(gradient_aggregation, compressor, sharding)
    return ReplicaOptions(
        compressor,
        bucket_bytes,
        check_desync,
        communication_options,
        check_batch_split(batch_split),
        silence_limit,
        sharding,
        local_updates,
        gradient_aggregation,
        pipeline,
    )


def _check_gradient_aggregation(
    rule: RobustRule | None, compressor: Compressor | None, sharding: Sharding | None
) -> None:
    if rule is None:
        return
    if not isinstance(rule, RobustRule):
        raise ValueError(
            f"`gradient_aggregation` must be a rule of `tfdml.aggregation`, or None. Received: "
            f"gradient_aggregation={rule!r}. Use for example "
            f"`tfdml.aggregation.TrimmedMean(num_byzantine=1)`."
        )
    if compressor is not None and not can_be_combined(compressor):
        raise ValueError(
            f"`compression` must encode all numbers of each rank's gradient on its own with "
            f"`gradient_aggregation`, which compares the ranks' numbers. Received: "
            f"compression={compressor!r}. Use Float16(), BFloat16(), QSGD(), "
            f"NaturalCompression(), TernGrad() or OneBit(), or leave out `compression`."
        )
    if sharding is not None and sharding.embeddings:
        raise ValueError(
            f"`sharding` must not have `embeddings` with `gradient_aggregation`, because a row's "
            f"gradient is added up where the row is, before ranks can be compared. Received: "
            f"sharding={sharding!r}. Leave out `embeddings`."
        )


def can_be_combined(compressor: Compressor) -> bool:
    """Returns whether a codec sends all numbers of each rank, which a robust rule can compare.

    Codecs whose sums alone are decoded, or that select numbers, on each rank others, do not.

    Args:
        compressor: The codec.
    """
    return isinstance(compressor, ChunkCompressor) and compressor.static


def _check_local_updates(
    local_updates: LocalUpdates | None,
    compressor: Compressor | None,
    sharding: Sharding | None,
    batch_split: Sequence[float] | str | None,
) -> None:
    if local_updates is None:
        return
    if not isinstance(local_updates, LocalUpdates):
        raise ValueError(
            f"`local_updates` must be a method of `tfdml.local_updates`, or None. Received: "
            f"local_updates={local_updates!r}. Use for example "
            f"`tfdml.local_updates.LocalSGD(sync_every=16)`."
        )
    if sharding is not None:
        raise ValueError(
            f"`sharding` must be None with `local_updates`, because a step without an exchange "
            f"needs all slots and tables on its rank. Received: sharding={sharding!r}. Leave out "
            f"one of the two."
        )
    if isinstance(compressor, DeepGradientCompression):
        raise ValueError(
            f"`compression` must not compute the optimizer's momentum with `local_updates`, "
            f"because each rank's optimizer does. Received: compression={compressor!r}. Use for "
            f"example tfdml.compression.TopK()."
        )
    if local_updates.synchronous_hosts and isinstance(batch_split, str):
        raise ValueError(
            f"`batch_split` must not be 'auto' with `synchronous_hosts`, because a rank's time "
            f"contains its waiting for the others of its host. Received: batch_split="
            f"{batch_split!r}. Use numbers, one for each replica, or None for equal parts."
        )


def check_batch_split(batch_split: Sequence[float] | str | None) -> tuple[int, ...] | str | None:
    """Returns the argument `batch_split`, with numbers as integers in the same proportion.

    Raises:
        ValueError: If it is not positive numbers, "auto" or None.
    """
    if batch_split is None or (isinstance(batch_split, str) and batch_split == "auto"):
        return batch_split
    is_list = isinstance(batch_split, Sequence) and not isinstance(batch_split, str)
    if not is_list or not batch_split or not all(map(_is_positive, batch_split)):
        raise ValueError(
            f"`batch_split` must be a list of positive numbers, one for each replica, or 'auto', "
            f"or None for equal parts. Received: batch_split={batch_split!r}. Use for example "
            f"[3, 1] on two processes, of which the first takes 3 of 4 rows."
        )
    return integer_weights(batch_split)


def check_number_of_parts(
    batch_split: tuple[int, ...] | str | None, replicas: int, what: str
) -> None:
    """Checks the length of a checked `batch_split`.

    Args:
        batch_split: Result of `check_batch_split`.
        replicas: The number of replicas of the job.
        what: Name of the replicas in messages.

    Raises:
        ValueError: If there is not one number for each replica.
    """
    if isinstance(batch_split, tuple) and len(batch_split) != replicas:
        raise ValueError(
            f"`batch_split` must have one number for each replica: {what}. Received: "
            f"{len(batch_split)} numbers for {replicas} replicas. Pass {replicas} numbers, or "
            f"'auto'."
        )


def _is_positive(number: Any) -> bool:
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    return is_number and math.isfinite(number) and number > 0


def check_seconds(name: str, seconds: float) -> None:
    """Checks an argument that is a number of seconds.

    Args:
        name: The argument's name.
        seconds: The argument's value.

    Raises:
        ValueError: If the value is not a positive number.
    """
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(
            f"`{name}` must be a positive number of seconds. Received: {name}={seconds!r}."
        )
