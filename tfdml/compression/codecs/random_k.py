"""Random-k sparsification: all processes send the same random indices, so all-reduces sum them."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.codecs.distinct_indices import distinct_indices
from tfdml.compression.codecs.top_k import check_ratio
from tfdml.compression.compressor import Step, SummableCompressor


@keras.saving.register_keras_serializable("tfdml")
class RandomK(SummableCompressor):
    """Compressor that sends a random part of each gradient; all processes draw the same indices.

    The indices are not sent. A value waits 1 / `ratio` steps on average, and the momentum of
    `keras.optimizers.SGD` waits with it: a step moves only the numbers that it has sent, except
    where `Auto` takes turns with other compressors. So SGD trains as without compression; Adam
    loses accuracy.

    Args:
        ratio: Fraction of the values that is sent.

    Raises:
        ValueError: If `ratio` is not above 0 and at most 1.

    Reference:
        Stich et al., "Sparsified SGD with Memory", arXiv:1809.07599.
    """

    # XLA does not support the draw of a short tensor's indices.
    compiles = False

    def __init__(self, ratio: float = 0.1):
        self.ratio = check_ratio(ratio)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"ratio": self.ratio}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of the values that are sent; see `SummableCompressor`."""
        return 4 * _count(math.prod(shape), self.ratio)

    def init(self, name: str, shape: Sequence[int]) -> dict[str, tf.Tensor]:
        """Returns the seed of the indices and the number of draws so far."""
        return {"drawn": tf.constant([zlib.crc32(name.encode()) & 0x7FFFFFFF, 0], tf.int32)}

    @property
    def momentum_waits(self) -> bool:
        """True unless every step sends all numbers; see `Compressor`."""
        return self.ratio < 1

    @property
    def steps(self) -> Sequence[Step]:
        """The stages that sum the values at the drawn indices; see `SummableCompressor`."""
        return self._send, self._spread

    def _send(self, gradients, states):
        lengths = [g.shape.num_elements() for g in gradients]
        indices = [
            distinct_indices(_count(length, self.ratio), length, state["drawn"])
            for length, state in zip(lengths, states, strict=True)
        ]
        numbers = [
            # A value that is not finite must reach all processes even if its index is not drawn.
            tf.gather(tf.reshape(g, [-1]), p) + tf.reduce_sum(g * 0.0)
            for g, p in zip(gradients, indices, strict=True)
        ]
        return numbers, indices

    def _spread(self, gradients, states, indices, sums):
        spread = [
            tf.reshape(tf.scatter_nd(p[:, None], s, [g.shape.num_elements()]), g.shape)
            for g, p, s in zip(gradients, indices, sums, strict=True)
        ]
        return spread, [{"drawn": s["drawn"] + tf.constant([0, 1])} for s in states], sums


def _count(length: int, ratio: float) -> int:
    return max(1, math.ceil(ratio * length))
