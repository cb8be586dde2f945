"""Numbers at random places, the same places on all processes: so they are summed on the wire."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.compressor import Step, SummableCompressor
from tfdml.compression.top_k import check_ratio


@keras.saving.register_keras_serializable("tfdml")
class RandomK(SummableCompressor):
    """Sends a random part of each gradient, without the places: all processes draw the same.

    A number waits 1 / `ratio` steps on average. With the default, SGD without momentum trains as
    without compression; momentum and Adam lose accuracy.

    Args:
        ratio: The part that is sent.

    Raises:
        ValueError: If `ratio` is not above 0 and at most 1.

    Reference:
        Stich et al., "Sparsified SGD with Memory", arXiv:1809.07599.
    """

    # What shuffles indices is not XLA's.
    compiles = False

    def __init__(self, ratio: float = 0.1):
        self.ratio = check_ratio(ratio)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"ratio": self.ratio}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of the numbers that are sent; see `SummableCompressor`."""
        return 4 * _count(math.prod(shape), self.ratio)

    def init(self, name: str, shape: Sequence[int]) -> dict[str, tf.Tensor]:
        """Returns the seed of the places, and how often they have been drawn."""
        return {"drawn": tf.constant([zlib.crc32(name.encode()) & 0x7FFFFFFF, 0], tf.int32)}

    @property
    def steps(self) -> Sequence[Step]:
        """Sums the numbers at the places; see `SummableCompressor`."""
        return self._send, self._spread

    def _send(self, gradients, states):
        places = [
            _draw(state["drawn"], g.shape.num_elements(), self.ratio)
            for g, state in zip(gradients, states, strict=True)
        ]
        numbers = [
            # A number that is not finite must be seen by all, also where it is not sent.
            tf.gather(tf.reshape(g, [-1]), p) + tf.reduce_sum(g * 0.0)
            for g, p in zip(gradients, places, strict=True)
        ]
        return numbers, places

    def _spread(self, gradients, states, places, sums):
        spread = [
            tf.reshape(tf.scatter_nd(p[:, None], s, [g.shape.num_elements()]), g.shape)
            for g, p, s in zip(gradients, places, sums, strict=True)
        ]
        return spread, [{"drawn": s["drawn"] + tf.constant([0, 1])} for s in states], sums


def _draw(seed: tf.Tensor, length: int, ratio: float) -> tf.Tensor:
    """Returns distinct places below `length`: int32, shape `[part of them]`."""
    places = tf.range(_count(length, ratio))
    return tf.random.experimental.index_shuffle(places, seed, length - 1)


def _count(length: int, ratio: float) -> int:
    return max(1, math.ceil(ratio * length))
