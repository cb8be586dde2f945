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
from tfdml.compression.exchange.owner_chunks import EncodedChunks, ExactChunks
from tfdml.compression.exchange.redistribution import OF_RANK
from tfdml.compression.exchange.step_state import (
    Commit,
    can_be_compressed,
    commit_if,
    counted_step,
    step_scales,
)
from tfdml.compression.exchange.two_phase import exchanged

# Names of what is kept for each gradient.
_MOMENTUM, _CENTER = OF_RANK.removesuffix("/"), "center"
# Function of the ranks' gradients in a chunk, `[ranks, chunk]`, and of the center there.
_Combination = Callable[[tf.Tensor, tf.Tensor | None], Combined]


@dataclasses.dataclass
class _Part:
    """Gradients of a bucket that are sent as one row of numbers to each owner.

    Attributes:
        indices: Indices of the gradients.
        chunks: Their chunks.
        means: Each rank's mean gradient in the owned chunk, once received: `[ranks, chunk]`.
    """

    indices: list[int]
    chunks: ExactChunks
    means: tf.Tensor | None = None


@dataclasses.dataclass
class _Bucket:
    """Gradients that are exchanged together, on a device, under a name."""

    indices: list[int]
    parts: list[_Part]
    name: str


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
        loss_scale = gradients.factors().loss_scale
        own = [_unscaled(g, loss_scale) for g in gradients.values]
        is_own_finite = _all_finite(own)
        # Updates by this rank's own gradients, and by the result, which is the same on all ranks.
        of_rank: list[Commit] = []
        of_result: list[Commit] = []
        weights = self._weights(gradients)
        own = self._averaged(own, gradients.names, weights[self._collective.rank], of_rank)
        buckets = self._send(gradients, own, weights, of_result)
        combine = self._combination(buckets, gradients, own, weights)
        results = self._give(buckets, combine, gradients, own)
        is_finite = _all_finite(results)
        for part in (part for bucket in buckets for part in bucket.parts):
            of_rank += part.chunks.own_commits
            of_result += part.chunks.owner_commits
        if isinstance(self._rule, VectorRule):
            of_result += zip(self._kept_for(_CENTER, gradients.names, own), results, strict=True)
        commit_if(is_finite, of_result)
        # A rank without rows in the batch has sent nothing.
        commit_if(is_finite & is_own_finite & (weights[self._collective.rank] > 0), of_rank)
        return self._parts_of(results, gradients, loss_scale, is_finite)

    def _divided(self, gradients: StepGradients) -> tuple[list[Bucket], list[Bucket]]:
        """Returns the buckets of gradients that are encoded, and those of the others."""
        indices = range(len(gradients.values))
        encoded = [i for i in indices if self._encodes(gradients.values[i])]
        exact = [i for i in indices if i not in encoded]
        dtypes = [_computed(gradients.values[i].dtype) for i in exact]
        sizes = [gradients.values[i].shape.num_elements() for i in exact]
        nbytes = [size * dtype.size for size, dtype in zip(sizes, dtypes, strict=True)]
        plain = [
            Bucket([exact[i] for i in bucket.indices], bucket.nbytes)
            for bucket in plan_buckets(nbytes, dtypes, self._bucket_bytes)
        ]
        if not encoded:
            return [], plain
        limit = self._bucket_bytes
        return compressed_buckets(self._compressor, encoded, gradients, limit), plain

    def _encodes(self, gradient: Gradient) -> bool:
        return self._compressor is not None and can_be_compressed(gradient, self._compressor)

    def _weights(self, gradients: StepGradients) -> tf.Tensor:
        """Returns all ranks' weights: float64, `[ranks]`."""
        size, own = self._collective.size, gradients.weight
        if own is None:
            return tf.fill([size], tf.constant(1 / size, tf.float64))
        own = tf.reshape(tf.cast(own, tf.float64), [1])
        gathered = self._collective.all_gather(own, f"{gradients.label}/weights")
        return tf.ensure_shape(gathered, [size])

    def _averaged(
        self,
        own: list[tf.Tensor],
        names: Sequence[str],
        weight: tf.Tensor,
        commits: list[Commit],
    ) -> list[tf.Tensor]:
        """Returns what this rank sends: its momentum times its weight, if the rule has one."""
        factor = self._rule.momentum
        if not factor:
            return own
        sent = []
        for gradient, kept in zip(own, self._kept_for(_MOMENTUM, names, own), strict=True):
            part = tf.cast(weight, gradient.dtype)
            before = kept.read_value()
            after = factor * before + (1 - factor) * tf.math.divide_no_nan(gradient, part)
            commits.append((kept, after))
            sent.append(after * part)
        return sent

    def _kept_for(
        self, key: str, names: Sequence[str], values: Sequence[tf.Tensor]
    ) -> list[tf.Variable]:
        """Returns a variable that is kept for each gradient, at first zeros of its shape."""
        return [
            self._kept.gradient_state(name, lambda v: {key: tf.zeros(v.shape, v.dtype)}, value)[key]
            for name, value in zip(names, values, strict=True)
        ]

    def _send(
        self,
        gradients: StepGradients,
        own: Sequence[tf.Tensor],
        weights: tf.Tensor,
        commits: list[Commit],
    ) -> list[_Bucket]:
        """Sends this rank's gradients to the owners of their chunks; receives the owned chunks."""
        given = dataclasses.replace(gradients, values=own)
        buckets = self._buckets_of(given, *self._divided(gradients), commits)
        for bucket in buckets:
            with on_device(gradients.devices, bucket.indices) as device:
                rows = [part.chunks.to_owners() for part in bucket.parts]
                all_to_all = self._collective.on(device).all_to_all
                received = exchanged(all_to_all, rows, f"{bucket.name}/to_owner")
                for part, payload in zip(bucket.parts, received, strict=True):
                    decoded = part.chunks.decoded(payload)
                    parts = tf.cast(weights, decoded.dtype)[:, tf.newaxis]
                    # Without rows, what a rank sends is 0.
                    part.means = decoded / tf.where(parts > 0, parts, 1)
        return buckets

    def _buckets_of(
        self,
        gradients: StepGradients,
        encoded: Sequence[Bucket],
        exact: Sequence[Bucket],
        commits: list[Commit],
    ) -> list[_Bucket]:
        """Returns the buckets of unscaled gradients, with their parts."""
        label, made = gradients.label, []
        if encoded:
            scales = step_scales(self._kept, self._compressor, gradients, commits)
            step = counted_step(self._kept, commits)
            memory = self._compressor.memory(self._collective.size)
        for number, (indices, _) in enumerate(encoded):
            name = f"{label}/encoded_{number}"
            own = gradients.at(indices)
            parts = [
                _Part(
                    [indices[i] for i in of_part],
                    EncodedChunks(
                        self._collective,
                        codec,
                        own.at(of_part),
                        name,
                        self._kept,
                        memory,
                        scales.memory,
                        step,
                    ),
                )
                for codec, of_part in self._compressor.parts([g.shape for g in own.values])
            ]
            made.append(_Bucket(indices, parts, name))
        for number, (indices, _) in enumerate(exact):
            chunks = ExactChunks(self._collective, gradients.at(indices).values)
            made.append(_Bucket(indices, [_Part(indices, chunks)], f"{label}/exact_{number}"))
        return made

    def _combination(
        self,
        buckets: Sequence[_Bucket],
        gradients: StepGradients,
        own: Sequence[tf.Tensor],
        weights: tf.Tensor,
    ) -> _Combination:
        """Returns the function that combines the ranks' gradients in a chunk."""
        rule = self._rule
        if not isinstance(rule, VectorRule):
            return lambda means, _: rule.combine(means, tf.cast(weights, means.dtype))
        products = []
        for bucket in buckets:
            with on_device(gradients.devices, bucket.indices):
                for part in bucket.parts:
                    apart = part.means - self._center_of(part, gradients, own)
                    products.append(tf.cast(tf.matmul(apart, apart, transpose_b=True), tf.float64))
        (products,) = self._collective.all_reduce(
            [tf.add_n(products)], f"{gradients.label}/products"
        )
        is_finite = tf.math.is_finite(tf.linalg.diag_part(products))
        both = is_finite & is_finite[:, tf.newaxis]
        known = tf.where(is_finite, weights, 0)
        coefficients, cut = rule.coefficients(tf.where(both, products, 0), known)
        present = tf.reduce_sum(tf.cast(weights > 0, tf.int32))
        is_majority = 2 * tf.reduce_sum(tf.cast(known > 0, tf.int32)) > present
        coefficients = tf.where(is_majority, coefficients, math.nan)
        cut = tf.where(is_finite, cut, 1)

        def combine(means: tf.Tensor, center: tf.Tensor) -> Combined:
            apart = tf.where(is_finite[:, tf.newaxis], means - center, 0)
            factors = tf.cast(coefficients, means.dtype)
            return Combined(center + tf.linalg.matvec(apart, factors, transpose_a=True), cut)

        return combine

    def _center_of(
        self, part: _Part, gradients: StepGradients, own: Sequence[tf.Tensor]
    ) -> tf.Tensor | None:
        """Returns the owned chunk of the last step's result, if the rule has a center."""
        if not isinstance(self._rule, VectorRule):
            return None
        names = [gradients.names[i] for i in part.indices]
        kept = self._kept_for(_CENTER, names, [own[i] for i in part.indices])
        return part.chunks.own_chunk([variable.read_value() for variable in kept])

    def _give(
        self,
        buckets: Sequence[_Bucket],
        combine: _Combination,
        gradients: StepGradients,
        own: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Gives all ranks the combined gradients, each chunk from its owner; returns all."""
        results: list[tf.Tensor] = [None] * len(own)
        for bucket in buckets:
            with on_device(gradients.devices, bucket.indices) as device:
                payloads = []
                for part in bucket.parts:
                    values, cut = combine(part.means, self._center_of(part, gradients, own))
                    if gradients.note_cut is not None:
                        gradients.note_cut(cut, part.means - values)
                    payloads.append(part.chunks.to_all(values))
                all_gather = self._collective.on(device).all_gather
                gathered = exchanged(all_gather, payloads, f"{bucket.name}/to_all")
                for part, payload, sent in zip(bucket.parts, gathered, payloads, strict=True):
                    payload = tf.ensure_shape(payload, [self._collective.size, sent.shape[1]])
                    for i, result in zip(part.indices, part.chunks.results(payload), strict=True):
                        results[i] = result
        return results

    def _parts_of(
        self,
        results: Sequence[tf.Tensor],
        gradients: StepGradients,
        loss_scale: tf.Tensor | None,
        is_finite: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the results as the optimizer gets them: scaled, this rank's parts of them."""
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
            result if cut is None else cut.part_of(result, self._collective.rank)
            for result, cut in zip(
                [result * tf.cast(factor, result.dtype) for result in typed],
                gradients.cuts,
                strict=True,
            )
        ]


def _computed(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which gradients of a dtype are combined."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def _unscaled(gradient: Gradient, loss_scale: tf.Tensor | None) -> tf.Tensor:
    """Returns a gradient as a dense one without loss scale."""
    dense = tf.convert_to_tensor(gradient)
    dense = tf.ensure_shape(tf.cast(dense, _computed(dense.dtype)), gradient.shape)
    return dense if loss_scale is None else dense / tf.cast(loss_scale, dense.dtype)


def _all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether all numbers are finite: bool, shape `[]`."""
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(t)) for t in tensors]))
