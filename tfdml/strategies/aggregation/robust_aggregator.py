"""Robust sums of gradients: a rule combines what the owner of each chunk got from all ranks."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.aggregation import RobustRule, VectorRule
from tfdml.aggregation.robust_rule import Combined
from tfdml.collectives.aggregator import Gradient, GradientAggregator, StepGradients, on_device
from tfdml.collectives.buckets import BUCKET_BYTES, Bucket, plan_buckets
from tfdml.collectives.collective import Collective
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.exchange.compressed_buckets import compressed_buckets
from tfdml.compression.exchange.kept_state import KeptState
from tfdml.compression.exchange.owner_chunks import EncodedChunks, ExactChunks, OwnedBucket
from tfdml.compression.exchange.redistribution import OF_RANK
from tfdml.compression.exchange.step_state import (
    Commit,
    can_be_compressed,
    commit_if,
    counted_step,
    step_scales,
)

# Names of what is kept for each gradient.
_MOMENTUM, _CENTER = OF_RANK.removesuffix("/"), "center"
# Function of the ranks' mean gradients in a chunk, `[ranks, chunk]`, and of the center there.
_Combination = Callable[[tf.Tensor, tf.Tensor | None], Combined]


class RobustAggregator(GradientAggregator):
    """Aggregator that combines the ranks' gradients by a robust rule.

    Each rank owns a chunk of every bucket: it receives that chunk from all ranks, applies the rule
    and sends the result to all, which takes the bytes of a sum in two phases. A rule for whole
    gradients also needs their inner products: the owners' parts of these are added up in one small
    exchange, once all buckets have come.

    The rule sees mean gradients of the unscaled loss: what a rank sends, divided by its weight.
    Sparse gradients are made dense. A step whose result is not finite (an overflow) leaves all
    state as it was; a rank whose own gradient is not finite keeps its own state.

    Args:
        collective: Collective between the ranks.
        rule: The rule.
        bucket_bytes: Bytes of gradients that are exchanged together.
        compressor: Codec of the exchanged gradients; None for none.

    Raises:
        ValueError: If there are too few ranks for the rule.
    """

    needs_weight = True

    def __init__(
        self,
        collective: Collective,
        rule: RobustRule,
        bucket_bytes: int = BUCKET_BYTES,
        compressor: ChunkCompressor | None = None,
    ):
        rule.check_ranks(collective.size)
        self._collective, self._rule = collective, rule
        self._bucket_bytes, self._compressor = bucket_bytes, compressor
        self._kept = KeptState({}, "")

    @property
    def state(self) -> dict[str, tf.Variable]:
        """This rank's own variables that are kept between steps, by name."""
        return dict(self._kept.variables)

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the state of an earlier job's ranks; see `GradientAggregator`."""
        self._kept.restore(before, self._collective.rank, self._collective.size)

    def buckets(self, gradients: StepGradients) -> list[Bucket]:
        """Returns which gradients are exchanged together; see `GradientAggregator`."""
        encoded, exact = self._divided(gradients)
        return [*encoded, *exact]

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Combines the ranks' gradients; see `GradientAggregator`."""
        loss_scale, rank = gradients.factors().loss_scale, self._collective.rank
        unscaled = [_unscaled(g, loss_scale) for g in gradients.values]
        # Updates by this rank's own gradients, and by the result, which is the same on all ranks.
        of_rank: list[Commit] = []
        of_result: list[Commit] = []
        weights = self._weights(gradients)
        own = dataclasses.replace(gradients, values=unscaled)
        own = self._averaged(own, weights[rank], of_rank)
        buckets = self._buckets_of(own, *self._divided(gradients), of_result)
        received = []
        for bucket in buckets:
            with on_device(own.devices, bucket.indices):
                received.append([_means(rows, weights) for rows in bucket.receive()])
        combine = self._combination(buckets, received, own, weights)
        results: list[tf.Tensor] = [None] * len(unscaled)
        for bucket, means in zip(buckets, received, strict=True):
            with on_device(own.devices, bucket.indices):
                combined = self._combined(bucket, means, own, combine)
                for i, result in zip(bucket.indices, bucket.give(combined), strict=True):
                    results[i] = result
        for _, chunks in (part for bucket in buckets for part in bucket.parts):
            of_rank += chunks.own_commits
            of_result += chunks.owner_commits
        if isinstance(self._rule, VectorRule):
            of_result += zip(self._kept_of(_CENTER, own), results, strict=True)
        is_finite = _all_finite(results)
        commit_if(is_finite, of_result)
        # A rank without rows in the batch has sent nothing.
        commit_if(is_finite & _all_finite(unscaled) & (weights[rank] > 0), of_rank)
        return self._as_given(results, gradients, loss_scale, is_finite)

    def _divided(self, gradients: StepGradients) -> tuple[list[Bucket], list[Bucket]]:
        """Returns the buckets of gradients that are encoded, and those of the others."""
        values, limit = gradients.values, self._bucket_bytes
        encoded = [i for i in range(len(values)) if self._encodes(values[i])]
        exact = [i for i in range(len(values)) if i not in encoded]
        dtypes = [_computed(values[i].dtype) for i in exact]
        nbytes = [
            values[i].shape.num_elements() * dtype.size
            for i, dtype in zip(exact, dtypes, strict=True)
        ]
        buckets = plan_buckets(nbytes, dtypes, limit)
        plain = [Bucket([exact[i] for i in bucket.indices], bucket.nbytes) for bucket in buckets]
        if not encoded:
            return [], plain
        return compressed_buckets(self._compressor, encoded, gradients, limit), plain

    def _encodes(self, gradient: Gradient) -> bool:
        return self._compressor is not None and can_be_compressed(gradient, self._compressor)

    def _buckets_of(
        self,
        gradients: StepGradients,
        encoded: Sequence[Bucket],
        exact: Sequence[Bucket],
        commits: list[Commit],
    ) -> list[OwnedBucket]:
        """Returns the exchanges of unscaled gradients.

        Args:
            gradients: The gradients.
            encoded: Which of them are encoded.
            exact: Which are sent as they are.
            commits: Updates of the step, which get those that encoding needs.
        """
        made = []
        if encoded:
            scales = step_scales(self._kept, self._compressor, gradients, commits)
            step = counted_step(self._kept, commits)
        for number, (indices, _) in enumerate(encoded):
            own, name = gradients.at(indices), f"{gradients.label}/encoded_{number}"
            parts = []
            codecs = self._compressor.parts([g.shape for g in own.values])
            for of_bucket, (codec, of_part) in enumerate(codecs):
                part, seeds = own.at(of_part), f"{name}/{of_bucket}"
                chunks = EncodedChunks(
                    self._collective, codec, part, seeds, self._kept, scales.memory, step
                )
                parts.append(([indices[i] for i in of_part], chunks))
            made.append(OwnedBucket(self._on_device_of(own), parts, name))
        for number, (indices, _) in enumerate(exact):
            own, name = gradients.at(indices), f"{gradients.label}/exact_{number}"
            parts = [(indices, ExactChunks(self._collective, own.values))]
            made.append(OwnedBucket(self._on_device_of(own), parts, name))
        return made

    def _on_device_of(self, gradients: StepGradients) -> Collective:
        return self._collective.on(gradients.devices[0] if gradients.devices else None)

    def _weights(self, gradients: StepGradients) -> tf.Tensor:
        """Returns all ranks' weights: float64, `[ranks]`."""
        size, own = self._collective.size, gradients.weight
        if own is None:
            return tf.fill([size], tf.constant(1 / size, tf.float64))
        own = tf.reshape(tf.cast(own, tf.float64), [1])
        gathered = self._collective.all_gather(own, f"{gradients.label}/weights")
        return tf.ensure_shape(gathered, [size])

    def _averaged(
        self, gradients: StepGradients, weight: tf.Tensor, commits: list[Commit]
    ) -> StepGradients:
        """Returns what this rank sends: its momentum times its weight, if the rule has one."""
        factor = self._rule.momentum
        if not factor:
            return gradients
        sent = []
        kept = self._kept_of(_MOMENTUM, gradients)
        for gradient, variable in zip(gradients.values, kept, strict=True):
            part = tf.cast(weight, gradient.dtype)
            mean = tf.math.divide_no_nan(gradient, part)
            after = factor * variable.read_value() + (1 - factor) * mean
            commits.append((variable, after))
            sent.append(after * part)
        return dataclasses.replace(gradients, values=sent)

    def _kept_of(self, key: str, gradients: StepGradients) -> list[tf.Variable]:
        """Returns a variable that is kept for each gradient, at first zeros of its shape."""
        return [
            self._kept.gradient_state(name, lambda v: {key: tf.zeros(v.shape, v.dtype)}, value)[key]
            for name, value in zip(gradients.names, gradients.values, strict=True)
        ]

    def _center(
        self, indices: Sequence[int], chunks: ExactChunks, gradients: StepGradients
    ) -> tf.Tensor | None:
        """Returns the owned chunk of the last step's result, if the rule has a center."""
        if not isinstance(self._rule, VectorRule):
            return None
        kept = self._kept_of(_CENTER, gradients.at(indices))
        return chunks.own_chunk([variable.read_value() for variable in kept])

    def _combination(
        self,
        buckets: Sequence[OwnedBucket],
        received: Sequence[Sequence[tf.Tensor]],
        gradients: StepGradients,
        weights: tf.Tensor,
    ) -> _Combination:
        """Returns the function that combines the ranks' gradients in a chunk.

        Args:
            buckets: The exchanges.
            received: The ranks' mean gradients in each owned chunk of each bucket.
            gradients: This rank's gradients.
            weights: All ranks' weights.
        """
        rule = self._rule
        if not isinstance(rule, VectorRule):
            return lambda means, _: rule.combine(means, tf.cast(weights, means.dtype))
        products = []
        for bucket, of_bucket in zip(buckets, received, strict=True):
            with on_device(gradients.devices, bucket.indices):
                for (indices, chunks), means in zip(bucket.parts, of_bucket, strict=True):
                    apart = means - self._center(indices, chunks, gradients)
                    products.append(tf.cast(tf.matmul(apart, apart, transpose_b=True), tf.float64))
        name = f"{gradients.label}/products"
        (products,) = self._collective.all_reduce([tf.add_n(products)], name)
        is_finite = tf.math.is_finite(tf.linalg.diag_part(products))
        both = is_finite & is_finite[:, tf.newaxis]
        known = tf.where(is_finite, weights, 0)
        coefficients, cut = rule.coefficients(tf.where(both, products, 0), known)
        wrong = tf.math.count_nonzero(~is_finite & (weights > 0))
        coefficients = tf.where(2 * wrong < self._collective.size, coefficients, math.nan)

        def combine(means: tf.Tensor, center: tf.Tensor) -> Combined:
            apart = tf.where(is_finite[:, tf.newaxis], means - center, 0)
            factors = tf.cast(coefficients, means.dtype)
            values = center + tf.linalg.matvec(apart, factors, transpose_a=True)
            return Combined(values, tf.where(is_finite, cut, 1))

        return combine

    def _combined(
        self,
        bucket: OwnedBucket,
        received: Sequence[tf.Tensor],
        gradients: StepGradients,
        combine: _Combination,
    ) -> list[tf.Tensor]:
        """Returns the combined chunks that this rank owns of a bucket."""
        found = []
        for (indices, chunks), means in zip(bucket.parts, received, strict=True):
            values, cut = combine(means, self._center(indices, chunks, gradients))
            if gradients.note_cut is not None:
                gradients.note_cut(cut, means - values)
            found.append(values)
        return found

    def _as_given(
        self,
        results: Sequence[tf.Tensor],
        gradients: StepGradients,
        loss_scale: tf.Tensor | None,
        is_finite: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the results with the loss scale, in the gradients' dtypes.

        Of gradients that are cut, this rank's parts are returned.
        """
        if loss_scale is not None:
            results = [result * tf.cast(loss_scale, result.dtype) for result in results]
        typed = [
            tf.cast(result, gradient.dtype)
            for result, gradient in zip(results, gradients.values, strict=True)
        ]
        if not gradients.cuts:
            return typed
        # Ranks that have different parts must see the same overflows.
        factor = tf.where(is_finite, 1.0, math.nan)
        return [
            (result if cut is None else cut.part_of(result, self._collective.rank))
            * tf.cast(factor, result.dtype)
            for result, cut in zip(typed, gradients.cuts, strict=True)
        ]


def _computed(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which gradients of a dtype are combined."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def _unscaled(gradient: Gradient, loss_scale: tf.Tensor | None) -> tf.Tensor:
    """Returns a gradient as a dense one without loss scale."""
    dense = tf.convert_to_tensor(gradient)
    dense = tf.ensure_shape(tf.cast(dense, _computed(dense.dtype)), gradient.shape)
    return dense if loss_scale is None else dense / tf.cast(loss_scale, dense.dtype)


def _means(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns the ranks' mean gradients, 0 for a rank without rows.

    Such a rank may have sent NaN, because it computes on a row of another one.
    """
    weights = tf.cast(weights, rows.dtype)[:, tf.newaxis]
    return tf.where(weights > 0, rows / weights, 0)


def _all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether all numbers are finite: bool, shape `[]`."""
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(t)) for t in tensors]))
