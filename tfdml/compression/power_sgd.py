"""PowerSGD: a gradient as the product of two thin matrices, by one step of power iteration."""

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.compressor import Step, SummableCompressor
from tfdml.compression.error_feedback import State

# Which part of a column must be new for it to count.
_REDUNDANT = 1e-4


@keras.saving.register_keras_serializable("tfdml")
class PowerSGD(SummableCompressor):
    """Sends a gradient of `n × m` as two matrices, `n × rank` and `m × rank`.

    A convolution's kernel of shape `[height, width, in, out]` is one of `height·width·in × out`.
    What a step leaves out is fed back, and the right-hand matrix of a step starts the next one's.
    Gradients for which that is no smaller, and vectors, go as they are.

    Args:
        rank: Columns of the two matrices: more send more and leave out less.
        alternate: Whether a step computes and sends one of the two only, in turns: half the bytes,
            half the work, one exchange instead of two, and more that is left out.

    Raises:
        ValueError: If `rank` is no positive integer.

    Reference:
        Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization", arXiv:1905.13727. In turns: Zhang et al., "Evaluation and Optimization of
        Gradient Compression for Distributed Deep Learning", arXiv:2306.08881.
    """

    def __init__(self, rank: int = 4, alternate: bool = False):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"`rank` must be a positive integer. Received: rank={rank!r}.")
        self.rank, self.alternate = rank, bool(alternate)

    @property
    def compiles(self) -> bool:
        """Whether XLA can compile the steps: in turns, what is sent differs in its shape."""
        return not self.alternate

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"rank": self.rank, "alternate": self.alternate}

    def takes(self, shape: Sequence[int], dtype: tf.DType) -> bool:
        """Returns whether the two matrices are smaller than the gradient."""
        if not super().takes(shape, dtype):
            return False
        rows, columns = _as_matrix(shape)
        return self.rank * (rows + columns) < rows * columns

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of the matrices; in turns, the mean; see `SummableCompressor`."""
        return 4 * self.rank * sum(_as_matrix(shape)) // (2 if self.alternate else 1)

    def init(self, name: str, shape: Sequence[int]) -> dict[str, tf.Tensor]:
        """Returns the right-hand matrix to start with: random, and the same on all processes."""
        rows, columns = _as_matrix(shape)
        seed = zlib.crc32(name.encode()) & 0x7FFFFFFF
        state = {"q": tf.random.stateless_normal([columns, self.rank], [seed, 0])}
        if self.alternate:
            state["p"] = tf.random.stateless_normal([rows, self.rank], [seed, 1])
            state["turn"] = tf.constant(0)
        return state

    @property
    def steps(self) -> Sequence[Step]:
        """Sums the left-hand matrices, then the right-hand ones; see `SummableCompressor`."""
        if self.alternate:
            return self._send_one, self._product_of_one
        return self._send_left, self._send_right, self._product

    def _send_left(self, gradients, states):
        return [_matrix(g) @ s["q"] for g, s in zip(gradients, states, strict=True)], []

    def _send_right(self, gradients, states, kept, lefts):
        lefts = [orthogonal(left) for left in lefts]
        return [_times(g, left) for g, left in zip(gradients, lefts, strict=True)], lefts

    def _product(self, gradients, states, lefts, rights):
        sums = [
            tf.reshape(product(left, right), g.shape)
            for left, right, g in zip(lefts, rights, gradients, strict=True)
        ]
        return sums, *self.after_rounds(states, rights)

    def after_rounds(
        self, states: Sequence[State], rights: Sequence[tf.Tensor]
    ) -> tuple[list[State], list[tf.Tensor]]:
        """Returns the next step's states, and what is finite where the products are.

        Args:
            states: This step's.
            rights: The sums of the right-hand matrices: shape `[rank, columns]`.
        """
        starts = [
            _next_start(tf.transpose(right), state["q"])
            for right, state in zip(rights, states, strict=True)
        ]
        return [{"q": start} for start in starts], self._bounds(rights)

    def _send_one(self, gradients, states):
        """Sends the left-hand matrices for given right-hand ones; in the next step the others."""
        right = tf.equal(states[0]["turn"], 1)
        bases = [
            tf.cond(right, lambda s=s: orthogonal(s["p"]), lambda s=s: orthogonal(s["q"]))
            for s in states
        ]
        sent = [
            tf.cond(
                right,
                lambda g=g, base=base: tf.transpose(_times(g, base)),
                lambda g=g, base=base: _matrix(g) @ base,
            )
            for g, base in zip(gradients, bases, strict=True)
        ]
        return sent, bases

    def _product_of_one(self, gradients, states, bases, totals):
        right = tf.equal(states[0]["turn"], 1)
        sums, after = [], []
        for g, state, base, total in zip(gradients, states, bases, totals, strict=True):
            product = tf.cond(
                right,
                lambda base=base, total=total: tf.matmul(base, total, transpose_b=True),
                lambda base=base, total=total: tf.matmul(total, base, transpose_b=True),
            )
            sums.append(tf.reshape(product, g.shape))
            p, q = tf.cond(
                right,
                lambda t=total, s=state: (s["p"], _next_start(t, s["q"])),
                lambda t=total, s=state: (_next_start(t, s["p"]), s["q"]),
            )
            p, q = tf.ensure_shape(p, state["p"].shape), tf.ensure_shape(q, state["q"].shape)
            after.append({"p": p, "q": q, "turn": 1 - state["turn"]})
        return sums, after, self._bounds(totals)

    def _bounds(self, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what no product with orthonormal columns exceeds, number by number."""
        return [self.rank * total for total in totals]


def _matrix(gradient: tf.Tensor) -> tf.Tensor:
    return tf.reshape(gradient, _as_matrix(gradient.shape))


def _times(gradient: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
    """Returns the right-hand matrix, transposed: the other way round it takes six times as long."""
    return tf.transpose(left) @ _matrix(gradient)


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows, shape[-1]


def product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Returns the product of a thin matrix and a flat one: one sum after the other.

    So that its bits do not depend on its shape, as those of a matrix product do.
    """
    total = left[:, :1] * right[:1]
    for k in range(1, left.shape[1]):
        total += left[:, k : k + 1] * right[k : k + 1]
    return total


def orthogonal(matrix: tf.Tensor) -> tf.Tensor:
    """Returns orthonormal columns that span those of `matrix`, with zeros for what is redundant.

    By Gram and Schmidt, column by column and twice each: the ranks are small, and it gives the same
    bits on all processes, whose matrices are the same sums. What is left of a column that the
    others span already is rounding, not a direction: it is dropped.
    """
    columns: list[tf.Tensor] = []
    for column in tf.unstack(matrix, axis=1):
        rest = _unit(column)
        if columns:
            others = tf.stack(columns)
            for _ in range(2):
                rest -= tf.linalg.matvec(others, tf.linalg.matvec(others, rest), transpose_a=True)
        redundant = tf.reduce_sum(rest * rest) < _REDUNDANT**2
        columns.append(tf.where(redundant, tf.zeros_like(rest), _unit(rest)))
    return tf.stack(columns, 1)


def _unit(column: tf.Tensor) -> tf.Tensor:
    """Returns a column of length 1, or of zeros; squares of tiny numbers do not vanish."""
    scaled = tf.math.divide_no_nan(column, tf.reduce_max(tf.abs(column), 0, keepdims=True))
    return tf.math.divide_no_nan(scaled, tf.norm(scaled, axis=0, keepdims=True))


def _next_start(right: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Returns what the next step starts with: where a column has vanished, the one before."""
    return tf.where(tf.reduce_any(right != 0, 0, keepdims=True), _unit(right), before)
