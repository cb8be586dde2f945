"""The stages of `PowerSGD` in the C++ operations of `tfdml.native`, each one pass over memory."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import tensorflow as tf

from tfdml import native
from tfdml.compression.codecs.power_sgd import PowerSGD, orthogonal
from tfdml.compression.compressor import SummableCompressor
from tfdml.compression.error_feedback import State


def operations(compressor: SummableCompressor) -> ModuleType | None:
    """Returns the compiled operations; None if they cannot be used."""
    # A subclass may have other stages, and alternating ones differ from step to step.
    if type(compressor) is not PowerSGD or compressor.alternate:
        return None
    return native.usable()


class NativeRounds:
    """The stages before, between and after the rounds; see `rounds`.

    XLA compiles the small computations, so that the values that processes must agree on are bitwise
    identical with and without the operations.

    Args:
        library: The compiled operations.
        compressor: Compressor that defines the matrices.
        size: The number of processes.
    """

    def __init__(self, library: ModuleType, compressor: PowerSGD, size: int):
        self._library, self._compressor, self._size = library, compressor, size
        # Nothing here branches on tensors, and autograph's rewriting is a sixth of the CPU time.
        compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
        self._orthogonal, self._after = compiled(orthogonal), compiled(self._after)

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
        lefts = self._orthogonal(totals)
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
        states, finite = self._after(states, rights, scale)
        sums = [tf.cast(s, d) for s, d in zip(sums, dtypes, strict=True)]
        return sums, finite, [{"residual": r} for r in residuals], states

    def _after(self, states, rights, scale) -> tuple[list[State], tf.Tensor]:
        states, bounds = self._compressor.after_rounds(states, rights)
        return states, all_finite(bounds, scale)


def all_finite(bounds: Sequence[tf.Tensor], scale: tf.Tensor) -> tf.Tensor:
    """Returns whether all values times the loss scale are finite: bool, shape `[]`."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(bound * scale)) for bound in bounds])
