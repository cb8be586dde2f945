"""Sums of compressed gradients over all processes, with error feedback."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import (
    Gradient,
    GradientAggregator,
    StepGradients,
    dense_buckets,
    on_device,
    sum_in_buckets,
)
from tfdml.collectives.buckets import BUCKET_BYTES, Bucket
from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.compression.compressor import ChunkCompressor, Compressor, SummableCompressor
from tfdml.compression.error_feedback import Scales
from tfdml.compression.exchange.by_hosts import (
    HostGroups,
    can_sum_by_hosts,
    sum_by_hosts,
)
from tfdml.compression.exchange.compressed_buckets import compressed_buckets
from tfdml.compression.exchange.host_state import HostState
from tfdml.compression.exchange.kept_state import KeptState
from tfdml.compression.exchange.native_rounds import all_have_operations
from tfdml.compression.exchange.rounds import sum_in_rounds
from tfdml.compression.exchange.sparse import sum_sparse
from tfdml.compression.exchange.state_bytes import state_bytes
from tfdml.compression.exchange.step_state import (
    Commit,
    can_be_compressed,
    commit_if,
    commits_of,
    counted_step,
    memories_of,
    step_scales,
    values_of,
)
from tfdml.compression.exchange.two_phase import sum_in_two_phases
from tfdml.compression.exchange.way_choice import is_faster_by_hosts


@dataclasses.dataclass
class _Sums:
    """A step's sums so far, and the updates that depend on them.

    Attributes:
        totals: The sums by gradient index; None where not computed yet.
        finite: Whether sums are finite: a boolean for each group of them.
        commits: Variables and their new values, assigned only if all of the step's sums are finite.
    """

    totals: list[Gradient | None]
    finite: list[tf.Tensor] = dataclasses.field(default_factory=list)
    commits: list[Commit] = dataclasses.field(default_factory=list)


class CompressedAggregator(GradientAggregator):
    """Aggregator that sums this process's gradients compressed, with error feedback.

    A biased compressor's error is kept per variable as a residual and added to the next gradient.
    Residuals are in the units of the unscaled loss, so changes of the loss scale do not matter.
    They are rescaled when the learning rate changes, because the weights would have received them
    at the earlier rate. A step whose sums are not finite (an overflow) leaves all state as it was;
    its sums are non-finite on all processes.

    Args:
        collective: Collective that moves tensors between processes.
        compressor: Compressor of the gradients.
        bucket_bytes: Bytes of gradients that are exchanged together.
        state: Dict that receives the state variables; aggregators may share it.
        prefix: Prefix of the exchanges' names.
        hosts: Hosts and their ranks: gradients may then be summed within hosts first. None to
            sum over all processes at once.
        choose_hosts: Function that decides whether to do that, from the collective, the hosts, the
            compressor and the gradients' shapes; by default it times both ways.
    """

    def __init__(
        self,
        collective: Collective,
        compressor: Compressor,
        bucket_bytes: int = BUCKET_BYTES,
        state: dict[str, tf.Variable] | None = None,
        prefix: str = "",
        hosts: Hosts | None = None,
        choose_hosts: Callable[..., bool] | None = None,
    ):
        self._collective = collective
        self._compressor = compressor
        self._memory = compressor.memory(collective.size)
        self._bucket_bytes = bucket_bytes
        self._kept = KeptState({} if state is None else state, prefix)
        two_levels = isinstance(compressor, ChunkCompressor) and hosts is not None
        self._hosts = hosts if two_levels and can_sum_by_hosts(compressor, hosts) else None
        self._choose_hosts = choose_hosts or is_faster_by_hosts
        self._prefix = prefix
        # Whether all processes use the operations of `native_rounds`; None until agreed on.
        self._uses_operations: bool | None = None

    @property
    def state(self) -> dict[str, tf.Variable]:
        """This process's own variables that are kept between steps, by name."""
        return dict(self._kept.variables)

    def state_bytes(self, gradients: StepGradients) -> dict[str, int]:
        """Returns the bytes of `state` after a step; see `GradientAggregator`.

        They are those of sums over all ranks at once. By hosts, a rank keeps less.
        """
        compressed, plain = self._divided(gradients)
        return state_bytes(
            self._compressor,
            self._collective.size,
            gradients.at(plain),
            [gradients.at(b.indices) for b in self._compressed_buckets(compressed, gradients)],
            self._name(gradients),
        )

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the state of an earlier job's ranks; see `GradientAggregator`."""
        self._kept.restore(before, self._collective.rank, self._collective.size, self._hosts)

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums gradients over all processes; see `GradientAggregator`."""
        compressed, plain = self._divided(gradients)
        sums = _Sums([None] * len(gradients.values))
        scales = step_scales(self._kept, self._compressor, gradients, sums.commits)
        totals = self._sum_plain(plain, gradients, scales, sums)
        if compressed or sums.commits:
            sums.finite += _all_finite(totals)
            self._sum_compressed(compressed, gradients, scales, sums)
            # The sums are the same on all processes, so all take the same branch.
            commit_if(tf.reduce_all(tf.stack(sums.finite)), sums.commits)
        return sums.totals

    def buckets(self, gradients: StepGradients) -> list[Bucket]:
        """Returns which gradients are exchanged together; see `GradientAggregator`."""
        compressed, plain = self._divided(gradients)
        uncompressed = dense_buckets([gradients.values[i] for i in plain], self._bucket_bytes)
        return [
            *self._compressed_buckets(compressed, gradients),
            *(Bucket([plain[i] for i in b.indices], b.nbytes) for b in uncompressed),
        ]

    def _compressed_buckets(self, indices: Sequence[int], gradients: StepGradients) -> list[Bucket]:
        return compressed_buckets(self._compressor, indices, gradients, self._bucket_bytes)

    def _divided(self, gradients: StepGradients) -> tuple[list[int], list[int]]:
        """Returns the indices of the gradients that are compressed, and of the others."""
        count = len(gradients.values)
        compressed = [
            i for i in range(count) if can_be_compressed(gradients.values[i], self._compressor)
        ]
        return compressed, [i for i in range(count) if i not in compressed]

    def _sum_plain(
        self, indices: Sequence[int], gradients: StepGradients, scales: Scales, sums: _Sums
    ) -> list[Gradient]:
        """Sums the gradients that are not compressed; returns the sums as received."""
        values, name = gradients.values, self._name(gradients)
        sparse = [i for i in indices if isinstance(values[i], tf.IndexedSlices)]
        dense = [i for i in indices if i not in sparse]
        own = gradients.at(dense)
        totals = [
            *sum_in_buckets(
                self._collective, own.values, name, self._bucket_bytes, devices=own.devices
            ),
            *sum_sparse(self._collective, gradients.at(sparse), name),
        ]
        for i, total in zip([*dense, *sparse], totals, strict=True):
            with on_device(gradients.devices, [i]):
                sums.totals[i] = self._after_sum(total, gradients.names[i], scales, sums)
        return totals

    def _sum_compressed(
        self, indices: Sequence[int], gradients: StepGradients, scales: Scales, sums: _Sums
    ) -> None:
        """Sums the compressed gradients bucket by bucket, and counts the step."""
        step = counted_step(self._kept, sums.commits)
        name = self._name(gradients)
        if isinstance(self._compressor, SummableCompressor):
            exchange = self._in_rounds
        else:
            by_hosts = self.sums_by_hosts(gradients)
            exchange = functools.partial(
                self._encoded, self._by_hosts if by_hosts else self._at_once
            )
        buckets = self._compressed_buckets(indices, gradients)
        for number, bucket in enumerate(buckets):
            own = gradients.at(bucket.indices)
            of_bucket = f"{name}/compressed_{number}"
            with on_device(gradients.devices, bucket.indices) as device:
                collective = self._collective.on(device)
                ready = collective.noted(own.values, f"{of_bucket}:ready")
                own = dataclasses.replace(own, values=ready)
                totals, finite, commits = exchange(collective, own, scales, step, of_bucket)
                totals = collective.noted(totals, f"{of_bucket}:done")
            sums.finite.append(finite)
            sums.commits += commits
            for i, total in zip(bucket.indices, totals, strict=True):
                sums.totals[i] = total

    def _name(self, gradients: StepGradients) -> str:
        return f"{self._prefix}{gradients.label}"

    def _after_sum(self, total: Gradient, name: str, scales: Scales, sums: _Sums) -> Gradient:
        """Returns the sum of an uncompressed gradient after the memory's update, e.g. momentum."""
        variables = self._kept.gradient_state(name, self._memory.init_plain, total.shape)
        if not variables:
            return total
        state = {key: value * scales.memory for key, value in values_of(variables).items()}
        dense = tf.cast(tf.convert_to_tensor(total), tf.float32) / scales.loss
        result, after = self._memory.after_sum(dense, state)
        sums.commits += commits_of([variables], [after])
        return tf.cast(result * scales.loss, total.dtype)

    def _encoded(
        self,
        way: Callable,
        collective: Collective,
        gradients: StepGradients,
        scales: Scales,
        step: tf.Tensor,
        name: str,
    ) -> tuple[list, tf.Tensor, list]:
        """Returns a bucket's sums, whether they are finite, and the state's new values."""
        sum_bucket, memories, servers = way(collective, gradients)
        sums, finite, after, servers_after = sum_bucket(
            self._compressor,
            gradients.values,
            [values_of(m) for m in memories],
            [values_of(s) for s in servers],
            scales,
            step,
            name,
        )
        return sums, finite, commits_of([*memories, *servers], [*after, *servers_after])

    def _at_once(
        self, collective: Collective, gradients: StepGradients
    ) -> tuple[Callable, list[dict], list[dict]]:
        """Returns the function that sums a bucket over all processes, and the state that it needs.

        The state is that of each gradient, then that of each part's chunk.
        """
        own, names, label = gradients.values, gradients.names, self._name(gradients)
        servers = [
            self._kept.owner_residual(
                f"{label}/{names[indices[0]]}",
                codec,
                sum(own[i].shape.num_elements() for i in indices),
                self._collective.size,
            )
            for codec, indices in self._compressor.parts([g.shape for g in own])
        ]
        return (
            functools.partial(sum_in_two_phases, collective),
            memories_of(self._kept, self._memory, gradients),
            servers,
        )

    def _by_hosts(
        self, collective: Collective, gradients: StepGradients
    ) -> tuple[Callable, list[dict], list[dict]]:
        """Returns the function that sums a bucket by hosts, and the state that it needs.

        The state is that of this rank's slice of each part, then that of its chunk.
        """
        own, names, label = gradients.values, gradients.names, self._name(gradients)
        groups = HostGroups(collective, self._hosts)
        state = HostState(self._kept, self._hosts, collective.rank)
        slices, servers = [], []
        for codec, indices in self._compressor.parts([g.shape for g in own]):
            part = groups.part(codec, [names[i] for i in indices], [own[i].shape for i in indices])
            of = f"{label}/{part.names[0]}"
            slices.append(state.slice_state(of, part, self._memory.init))
            servers.append(state.residual(of, part) if codec.biased else {})
        return functools.partial(sum_by_hosts, groups), slices, servers

    def sums_by_hosts(self, gradients: StepGradients) -> bool:
        """Returns whether the compressed gradients are summed within hosts first.

        All processes call this; the first call decides it.

        Args:
            gradients: A step's gradients; only their dtypes and shapes are used.
        """
        compressed, _ = self._divided(gradients)
        if self._hosts is None or not compressed:
            return False

        def choose() -> bool:
            shapes = [gradients.values[i].shape.as_list() for i in compressed]
            return self._choose_hosts(self._collective, self._hosts, self._compressor, shapes)

        state = HostState(self._kept, self._hosts, self._collective.rank)
        return state.way(self._name(gradients), choose)

    def _in_rounds(
        self,
        collective: Collective,
        gradients: StepGradients,
        scales: Scales,
        step: tf.Tensor,
        name: str,
    ) -> tuple[list, tf.Tensor, list]:
        """Returns a bucket's sums, whether they are finite, and the state's new values."""
        del step
        if self._uses_operations is None:
            self._uses_operations = all_have_operations(self._collective, self._compressor)
        own, names = gradients.values, gradients.names
        memories = memories_of(self._kept, self._memory, gradients)
        states = [
            self._kept.gradient_state(n, self._compressor.init, n, g.shape)
            for n, g in zip(names, own, strict=True)
        ]
        sums, finite, after, states_after = sum_in_rounds(
            collective,
            self._compressor,
            own,
            [values_of(m) for m in memories],
            [values_of(s) for s in states],
            scales,
            name,
            self._uses_operations,
        )
        return sums, finite, commits_of([*memories, *states], [*after, *states_after])


def _all_finite(totals: Sequence[Gradient]) -> list[tf.Tensor]:
    """Returns for each sum of floats whether it is finite."""
    values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in totals]
    return [tf.reduce_all(tf.math.is_finite(v)) for v in values if v.dtype.is_floating]
