"""Deep gradient compression: sends the largest values after local momentum accumulation."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.codecs.selection import decoded_rows, decoded_sum, encoded_largest
from tfdml.compression.codecs.top_k import check_ratio
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import Memory, State

# The fraction that is sent at the start of the warm-up, as in the paper.
_FIRST_RATIO = 0.25


@keras.saving.register_keras_serializable("tfdml")
class DeepGradientCompression(ChunkCompressor):
    """Compressor that sends the largest thousandth of each process's accumulated values.

    It applies the momentum before the exchange, which is correct for values that are sent late
    (momentum correction), and clears the momentum of values that were sent (masking). So it is for
    `keras.optimizers.SGD` with momentum, whose own momentum is then left out; uncompressed
    gradients get theirs after the exchange. On one process the optimizer applies its own.

    The largest values are found by a threshold from a sample, as in the paper, but exactly. During
    the warm-up more is sent: 25 % at first, then less by the same factor at each step.

    Args:
        ratio: Fraction of all values that is sent after the warm-up.
        momentum: The optimizer's momentum.
        nesterov: The optimizer's `nesterov`.
        warmup_epochs: Epochs until `ratio` is reached; the paper's is 4.
        steps_per_epoch: Optimizer updates per epoch; required for a warm-up.
        clip_norm: Largest norm of a variable's gradient, None for no clipping. Each of N processes
            clips its part to `clip_norm / sqrt(N)` before accumulating it.
        masking: Whether the momentum of values that were sent is cleared.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for
        Distributed Training", arXiv:1712.01887.
    """

    block = 8
    static = False
    replaces_momentum = True

    def __init__(
        self,
        ratio: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        warmup_epochs: float = 0,
        steps_per_epoch: int | None = None,
        clip_norm: float | None = None,
        masking: bool = True,
    ):
        self.ratio = check_ratio(ratio)
        if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be the optimizer's, from 0 to less than 1. Received: "
                f"momentum={momentum!r}."
            )
        if not isinstance(warmup_epochs, int | float) or warmup_epochs < 0:
            raise ValueError(
                f"`warmup_epochs` must be a number of epochs, 0 for no warm-up. Received: "
                f"warmup_epochs={warmup_epochs!r}."
            )
        if warmup_epochs and (not isinstance(steps_per_epoch, int) or steps_per_epoch < 1):
            raise ValueError(
                f"`steps_per_epoch` must be a positive integer with a warm-up: the rows of the "
                f"data by the batch size, rounded up. Received: steps_per_epoch="
                f"{steps_per_epoch!r}, warmup_epochs={warmup_epochs!r}."
            )
        if clip_norm is not None and (
            not isinstance(clip_norm, int | float) or not 0 < clip_norm < math.inf
        ):
            raise ValueError(
                f"`clip_norm` must be positive, or None for no clipping. Received: "
                f"clip_norm={clip_norm!r}."
            )
        self.momentum, self.nesterov = float(momentum), bool(nesterov)
        self.warmup_epochs, self.steps_per_epoch = warmup_epochs, steps_per_epoch
        self.clip_norm, self.masking = clip_norm, bool(masking)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "ratio": self.ratio,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "warmup_epochs": self.warmup_epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "clip_norm": self.clip_norm,
            "masking": self.masking,
        }

    def memory(self, size: int) -> Memory:
        """Returns the momentum correction; see `Compressor`."""
        clip = None if self.clip_norm is None else self.clip_norm / math.sqrt(size)
        return MomentumCorrection(self.momentum, self.nesterov, clip, self.masking)

    def check_optimizer(self, optimizer: keras.Optimizer) -> None:
        """Rejects an optimizer other than SGD with the same momentum.

        Raises:
            ValueError: If `optimizer` is not `keras.optimizers.SGD` with the same momentum.
        """
        if type(optimizer) is not keras.optimizers.SGD:
            raise ValueError(
                f"`DeepGradientCompression` must be used with keras.optimizers.SGD: the momentum "
                f"that it corrects is defined only for it. Received: "
                f"{type(optimizer).__name__}. Choose another compressor, such as "
                f"tfdml.compression.TopK(0.01), for this optimizer."
            )
        theirs = (float(optimizer.momentum), bool(optimizer.nesterov))
        if theirs != (self.momentum, self.nesterov):
            raise ValueError(
                f"`momentum` and `nesterov` must be the optimizer's. Received: momentum="
                f"{self.momentum}, nesterov={self.nesterov}, and from SGD momentum={theirs[0]}, "
                f"nesterov={theirs[1]}. Give both the same."
            )

    def ratio_at(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the fraction that is sent in a step: float64, shape `[]`."""
        if not self._warms_up:
            return tf.constant(self.ratio, tf.float64)
        steps = self.warmup_epochs * self.steps_per_epoch
        progress = tf.minimum(tf.cast(step, tf.float64) / steps, 1.0)
        return _FIRST_RATIO * tf.exp(math.log(self.ratio / _FIRST_RATIO) * progress)

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes after the warm-up; see `ChunkCompressor`."""
        return 8 * self._count(self.ratio, length)

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        length = values.shape[1]
        if not self._warms_up:
            count = self._count(self.ratio, length)
            return encoded_largest(values, count, count)
        count = tf.cast(tf.math.ceil(self.ratio_at(seed[0]) * length), tf.int32)
        most = self._count(_FIRST_RATIO, length)
        return encoded_largest(values, tf.clip_by_value(count, 1, most), most)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes rows of values; see `ChunkCompressor`."""
        return decoded_rows(payload, length)

    def decode_sum(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes the rows and sums them; see `ChunkCompressor`."""
        return decoded_sum(payload, length)

    @property
    def _warms_up(self) -> bool:
        return bool(self.warmup_epochs) and self.ratio < _FIRST_RATIO

    @staticmethod
    def _count(ratio: float, length: int) -> int:
        return max(1, math.ceil(ratio * length))


class MomentumCorrection(Memory):
    """Memory that accumulates momentum-corrected gradients until they are sent.

    Args:
        momentum: The momentum factor.
        nesterov: Whether to use Nesterov momentum.
        clip_norm: Largest norm of a gradient, None for no clipping.
        masking: Whether the momentum of values that were sent is cleared.
    """

    def __init__(self, momentum: float, nesterov: bool, clip_norm: float | None, masking: bool):
        self.momentum, self.nesterov = momentum, nesterov
        self.clip_norm, self.masking = clip_norm, masking
        self.elementwise = clip_norm is None

    def init(self, shape: Sequence[int]) -> State:
        """Returns a velocity and a residual of zeros; see `Memory`."""
        return {"velocity": tf.zeros(shape), "residual": tf.zeros(shape)}

    def compensate(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the accumulated values that have not been sent; see `Memory`."""
        if self.clip_norm is not None:
            gradient = tf.clip_by_norm(gradient, self.clip_norm)
        speed, step = self._move(gradient, state["velocity"])
        return state["residual"] + step, {"velocity": speed}

    def update(self, value: tf.Tensor, sent: tf.Tensor, state: State) -> State:
        """Returns the new residual and the masked velocity; see `Memory`."""
        speed = state["velocity"]
        if self.masking:
            speed = tf.where(sent != 0, tf.zeros_like(speed), speed)
        return {"velocity": speed, "residual": value - sent}

    def init_plain(self, shape: Sequence[int]) -> State:
        """Returns a velocity of zeros; see `Memory`."""
        return {"sum_velocity": tf.zeros(shape)}

    def after_sum(self, total: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the sum after its momentum; see `Memory`."""
        speed, step = self._move(total, state["sum_velocity"])
        return step, {"sum_velocity": speed}

    def _move(self, gradient: tf.Tensor, speed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the new velocity and the resulting update."""
        speed = self.momentum * speed + gradient
        return speed, self.momentum * speed + gradient if self.nesterov else speed
