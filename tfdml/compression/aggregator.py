"""Sums gradients over all processes in fewer bytes: what is compressed, sent, fed back and kept."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, sum_gradients
from tfdml.collectives.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, plan_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.own_variable import own_variable
from tfdml.compression.compressor import ChunkCompressor, Compressor, SummableCompressor
from tfdml.compression.keeping import kept_by
from tfdml.compression.two_phase import sum_in_two_phases


class CompressedAggregator:
    """One process's part in summing compressed gradients.

    What a biased compressor leaves out of a step is kept, per variable, and added to its next
    gradient. It is kept in the units of the unscaled loss, so a loss scale that changes does not
    matter, and follows the learning rate, in whose proportion it would have gone into the weights.
    A step whose sums are not finite (an overflow) leaves all that is kept as it was; its sums come
    out as not finite on all processes.

    Args:
        collective: What moves the bytes.
        compressor: What makes them fewer.
        bucket_bytes: Bytes of gradients that go together.
    """

    def __init__(
        self,
        collective: Collective,
        compressor: Compressor,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    ):
        self._collective = collective
        self._compressor = compressor
        self._bucket_bytes = (bucket_bytes, first_bucket_bytes)
        self._state: dict[str, tf.Variable] = {}
        # What an earlier job's ranks have kept; variables are made when they are first used.
        self._before: list[Mapping[str, np.ndarray]] = []

    @property
    def state(self) -> dict[str, tf.Variable]:
        """What is kept between steps, by name: this process's own."""
        return dict(self._state)

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Goes on with what the ranks of an earlier job have kept.

        Args:
            before: Each rank's `state`, in the order of the ranks, however many they were.
        """
        self._before = list(before)
        for name, variable in self._state.items():
            variable.assign(self._start(name, tf.zeros_like(variable)))

    def sum_gradients(
        self,
        gradients: Sequence[Gradient],
        names: Sequence[str],
        label: str,
        loss_scale: tf.Tensor | None = None,
        learning_rate: tf.Tensor | None = None,
    ) -> list[Gradient]:
        """Sums gradients over all processes.

        Args:
            gradients: This process's gradients, in the order of the layers.
            names: Their variables' paths.
            label: What the exchanges are called.
            loss_scale: What the gradients are multiplied with, None for 1.
            learning_rate: The rate of this step, None where it is not known.

        Returns:
            The sums, in the order of `gradients`: the same bits on all processes.
        """
        dense = [not isinstance(g, tf.IndexedSlices) for g in gradients]
        taken = [
            i
            for i, g in enumerate(gradients)
            if dense[i] and g.shape.is_fully_defined() and self._compressor.takes(g.shape, g.dtype)
        ]
        others = [i for i in range(len(gradients)) if i not in set(taken)]
        result: list[Gradient | None] = [None] * len(gradients)
        plain = sum_gradients(
            self._collective, [gradients[i] for i in others], label, *self._bucket_bytes
        )
        for i, total in zip(others, plain, strict=True):
            result[i] = total
        if not taken:
            return result
        scale = tf.constant(1.0) if loss_scale is None else tf.cast(loss_scale, tf.float32)
        kept = self._kept_factor(label, learning_rate)
        own = []
        for i in taken:
            own.append(tf.cast(gradients[i], tf.float32) / scale)
            if self._compressor.biased:
                own[-1] += self._zeros(f"residual/{names[i]}", own[-1].shape) * kept
        sums, left, commits = self._exchange(own, [names[i] for i in taken], label)
        if self._compressor.biased:
            residuals = [self._state[f"residual/{names[i]}"] for i in taken]
            commits += list(zip(residuals, left, strict=True))
        # The sums are the same on all processes, and so is this vote.
        values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in [*plain, *sums]]
        checked = [tf.reduce_all(tf.math.is_finite(v)) for v in values if v.dtype.is_floating]
        finite = tf.reduce_all(tf.stack(checked))
        for variable, value in commits:
            variable.assign(tf.where(finite, value, variable))
        for i, total in zip(taken, sums, strict=True):
            result[i] = tf.cast(total * scale, gradients[i].dtype)
        return result

    def _exchange(
        self, own: Sequence[tf.Tensor], names: Sequence[str], label: str
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tuple[tf.Variable, tf.Tensor]]]:
        """Returns the sums, what was left out of `own`, and the new values of what is kept."""
        if isinstance(self._compressor, SummableCompressor):
            return self._in_rounds(self._compressor, own, names, label)
        return self._in_buckets(self._compressor, own, names, label)

    def _in_rounds(
        self,
        compressor: SummableCompressor,
        own: Sequence[tf.Tensor],
        names: Sequence[str],
        label: str,
    ) -> tuple[list, list, list]:
        states = [self._states(compressor, n, g.shape) for n, g in zip(names, own, strict=True)]
        rounds = compressor.reduce(own, [{k: v.value() for k, v in s.items()} for s in states])
        # A number that is not finite must be seen by all, also where it would not be sent.
        finite = [tf.reduce_all(tf.math.is_finite(g)) for g in own]
        payload = [
            tf.where(good, part, float("nan"))
            for good, part in zip(finite, next(rounds), strict=True)
        ]
        number = 0
        while True:
            total = self._collective.all_reduce(payload, f"{label}/round_{number}")
            try:
                payload, number = rounds.send(total), number + 1
            except StopIteration as end:
                sums, after = end.value
                break
        # Each process answers for its part of what the sum leaves out.
        left = [g - total / self._collective.size for g, total in zip(own, sums, strict=True)]
        commits = [
            (variable, new[key])
            for state, new in zip(states, after, strict=True)
            for key, variable in state.items()
        ]
        return sums, left, commits

    def _in_buckets(
        self,
        compressor: ChunkCompressor,
        own: Sequence[tf.Tensor],
        names: Sequence[str],
        label: str,
    ) -> tuple[list, list, list]:
        sums: list[tf.Tensor | None] = [None] * len(own)
        left: list[tf.Tensor | None] = [None] * len(own)
        commits = []
        sizes = [g.shape.num_elements() for g in own]
        step = self._zeros("step", [], tf.int32)
        commits.append((step, step + 1))
        buckets = plan_buckets([4 * s for s in sizes], [tf.float32] * len(own), *self._bucket_bytes)
        for number, bucket in enumerate(buckets):
            flat = tf.concat([tf.reshape(own[i], [-1]) for i in bucket.indices], 0)
            name = f"{label}/compressed_{number}"
            chunk = chunk_length(flat.shape[0], self._collective.size, compressor.block)
            server = None
            if compressor.biased:
                server = self._zeros(f"server_residual/{name}", [chunk])
            total, sent, server_left = sum_in_two_phases(
                self._collective, compressor, flat, chunk, server, step, name
            )
            if server is not None:
                commits.append((server, server_left))
            lengths = [sizes[i] for i in bucket.indices]
            parts, gone_parts = tf.split(total, lengths), tf.split(flat - sent, lengths)
            for i, part, gone in zip(bucket.indices, parts, gone_parts, strict=True):
                sums[i] = tf.reshape(part, own[i].shape)
                left[i] = tf.reshape(gone, own[i].shape)
        return sums, left, commits

    def _kept_factor(self, label: str, learning_rate: tf.Tensor | None) -> tf.Tensor:
        """Returns what the kept residuals are multiplied with, for a rate that has changed."""
        if learning_rate is None or not self._compressor.biased:
            return tf.constant(1.0)
        now = tf.cast(learning_rate, tf.float32)
        last = self._zeros(f"learning_rate/{label}", [])
        before = last.read_value()
        factor = tf.where((before > 0) & (now > 0), before / now, 1.0)
        last.assign(now)
        return factor

    def _states(
        self, compressor: SummableCompressor, name: str, shape: tf.TensorShape
    ) -> dict[str, tf.Variable]:
        """Returns what a compressor keeps for one gradient."""
        with tf.init_scope():
            start = compressor.init(name, shape)
        return {key: self._kept(f"{key}/{name}", value) for key, value in start.items()}

    def _zeros(self, name: str, shape: Sequence[int], dtype: tf.DType = tf.float32) -> tf.Variable:
        with tf.init_scope():
            return self._kept(name, tf.zeros(shape, dtype))

    def _kept(self, name: str, start: tf.Tensor) -> tf.Variable:
        """Returns what is kept under a name; not the strategy's, but this process's own."""
        if name not in self._state:
            self._state[name] = own_variable(self._start(name, start))
        return self._state[name]

    def _start(self, name: str, start: tf.Tensor) -> tf.Tensor:
        if not self._before or name not in self._before[0]:
            return start
        own = (self._collective.rank, self._collective.size)
        return tf.constant(kept_by(*own, name, self._before, start.shape.num_elements()))


def chunk_length(length: int, size: int, block: int) -> int:
    """Returns how many numbers of a bucket each process sums: a multiple of the block."""
    return -(-length // (size * block)) * block
