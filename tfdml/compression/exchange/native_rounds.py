"""The stages of `PowerSGD` in the C++ operations of `tfdml.native`, each one pass over memory."""

from collections.abc import Callable, Sequence
from types import ModuleType

import tensorflow as tf

from tfdml import native
from tfdml.collectives.collective import Collective
from tfdml.compression.codecs.power_sgd import PowerSGD
from tfdml.compression.compressor import SummableCompressor
from tfdml.compression.error_feedback import State


def operations(compressor: SummableCompressor) -> ModuleType | None:
    """Returns the compiled operations; None if they cannot be used."""
    return native.usable() if _has_stages(compressor) else None


def all_have_operations(collective: Collective, compressor: SummableCompressor) -> bool:
    """Returns whether all processes can use the compiled operations; all processes call this.

    Each process computes the next factors from the same sums and must get the same bits, and XLA
    rounds otherwise than the operations do.

    Args:
        collective: Collective between the processes.
        compressor: Compressor of the gradients.
    """
    if not _has_stages(compressor):
        return False
    if not collective.crosses_processes:
        return operations(compressor) is not None
    with tf.init_scope():
        own = tf.constant([operations(compressor) is not None], tf.int32)
        (total,) = collective.all_reduce([own], "have_low_rank_operations")
        return int(total[0]) == collective.size


def _has_stages(compressor: SummableCompressor) -> bool:
    # A subclass may have other stages, and alternating ones differ from step to step.
    return type(compressor) is PowerSGD and not compressor.alternate


class NativeRounds:
    """The stages before, between and after the rounds; see `rounds`.

    Args:
        library: The compiled operations.
        size: The number of processes.
    """

    def __init__(self, library: ModuleType, size: int):
        self._library, self._size = library, size

    @property
    def between(self) -> Sequence[Callable]:
        """The stages between the rounds."""
        return [self._right]

    def begin(
        self,
        gradients: Sequence[tf.Tensor],
        memories: Sequence[State],
        states: Sequence[State],
        scale: tf.Tensor,
        memory_scale: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[State], list[tf.Tensor], list]:
        """Returns the compensated gradients, empty states, and the left-hand matrices to send."""
        values, lefts = self._library.tfdml_left(
            gradients=[tf.cast(g, tf.float32) for g in gradients],
            residuals=[m["residual"] for m in memories],
            starts=[s["q"] for s in states],
            scale=scale,
            memory_scale=memory_scale,
        )
        return values, [{} for _ in values], lefts, []

    def _right(self, values, states, carried, totals) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the right-hand matrices to send, and the orthonormal left-hand ones to keep."""
        del states, carried
        lefts = self._library.tfdml_orthogonal(lefts=totals)
        return self._library.tfdml_right(values=values, lefts=lefts), lefts

    def end(
        self,
        values: Sequence[tf.Tensor],
        middles: Sequence[State],
        states: Sequence[State],
        lefts: Sequence[tf.Tensor],
        rights: Sequence[tf.Tensor],
        scale: tf.Tensor,
        dtypes: Sequence[tf.DType],
    ) -> tuple[list[tf.Tensor], tf.Tensor, list[State], list[State]]:
        """Returns the sums, whether they are finite, the new memories and the new states."""
        del middles
        sums, residuals = self._library.tfdml_product(
            values=values, lefts=lefts, rights=rights, scale=scale, size=self._size
        )
        starts, finite = self._library.tfdml_next_starts(
            rights=rights, starts=[s["q"] for s in states], scale=scale
        )
        sums = [tf.cast(s, d) for s, d in zip(sums, dtypes, strict=True)]
        return sums, finite, [{"residual": r} for r in residuals], [{"q": s} for s in starts]
