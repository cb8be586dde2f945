"""PowerSGD: low-rank approximation of gradients by one step of power iteration."""

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.compressor import Step, SummableCompressor

# A column counts only if its component orthogonal to the others exceeds this fraction of it.
_REDUNDANT = 1e-4


@keras.saving.register_keras_serializable("tfdml")
class PowerSGD(SummableCompressor):
    """Compressor that sends an `n × m` gradient as two matrices, `n × rank` and `m × rank`.

    A convolution kernel of shape `[height, width, in, out]` is a matrix of `height·width·in × out`.
    The error is fed back, and a step's right-hand matrix is the starting point of the next step.
    Gradients for which this is not smaller, and vectors, are sent uncompressed.

    Args:
        rank: Columns of the two matrices: a higher rank sends more and has a smaller error.
        alternate: Whether each step computes and sends only one of the two matrices, in turns: half
            the bytes and half the work, one exchange instead of two, but a larger error.

    Raises:
        ValueError: If `rank` is not a positive integer.

    Reference:
        Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization", arXiv:1905.13727. Alternating: Zhang et al., "Evaluation and Optimization of
        Gradient Compression for Distributed Deep Learning", arXiv:2306.08881.
    """

    def __init__(self, rank: int = 4, alternate: bool = False):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"`rank` must be a positive integer. Received: rank={rank!r}.")
        self.rank, self.alternate = rank, bool(alternate)

    @property
    def compiles(self) -> bool:
        """True unless `alternate`, which varies the shape that is sent."""
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
        """Returns the bytes of the matrices; if alternating, the mean; see `SummableCompressor`."""
        return 4 * self.rank * sum(_as_matrix(shape)) // (2 if self.alternate else 1)

    def init(self, name: str, shape: Sequence[int]) -> dict[str, tf.Tensor]:
        """Returns the initial right-hand matrix: random, and the same on all processes."""
        rows, columns = _as_matrix(shape)
        seed = zlib.crc32(name.encode()) & 0x7FFFFFFF
        state = {"q": tf.random.stateless_normal([columns, self.rank], [seed, 0])}
        if self.alternate:
            state["p"] = tf.random.stateless_normal([rows, self.rank], [seed, 1])
            state["turn"] = tf.constant(0)
        return state

    @property
    def steps(self) -> Sequence[Step]:
        """The stages, left-hand matrices first, then right-hand ones; see `SummableCompressor`."""
        if self.alternate:
            return self._send_one, self._product_of_one
        return self._send_left, self._send_right, self._product

    def _send_left(self, gradients, states):
        return [_matrix(g) @ s["q"] for g, s in zip(gradients, states, strict=True)], []

    def _send_right(self, gradients, states, carried, lefts):
        lefts = orthogonal(lefts)
        return [_times(g, left) for g, left in zip(gradients, lefts, strict=True)], lefts

    def _product(self, gradients, states, lefts, rights):
        sums = [
            tf.reshape(product(left, right), g.shape)
            for left, right, g in zip(lefts, rights, gradients, strict=True)
        ]
        starts = [
            _next_start(tf.transpose(right), state["q"])
            for right, state in zip(rights, states, strict=True)
        ]
        return sums, [{"q": start} for start in starts], self._bounds(rights)

    def _send_one(self, gradients, states):
        """Sends the left-hand matrices for given right-hand ones, and the reverse in turns."""
        right = tf.equal(states[0]["turn"], 1)
        bases = [
            tf.cond(right, lambda s=s: orthogonal([s["p"]])[0], lambda s=s: orthogonal([s["q"]])[0])
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
        """Returns upper bounds of the products' magnitudes: their other factor is orthonormal."""
        return [self.rank * total for total in totals]


def _matrix(gradient: tf.Tensor) -> tf.Tensor:
    return tf.reshape(gradient, _as_matrix(gradient.shape))


def _times(gradient: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
    """Returns the right-hand matrix, transposed: the other order of factors is six times slower."""
    return tf.transpose(left) @ _matrix(gradient)


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows, shape[-1]


def product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Returns the product of a tall and a wide matrix, one rank-1 term after the other.

    Unlike those of `tf.matmul`, the result's bits do not depend on the shape.
    """
    total = left[:, :1] * right[:1]
    for k in range(1, left.shape[1]):
        total += left[:, k : k + 1] * right[k : k + 1]
    return total


def orthogonal(matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns, for each matrix, orthonormal columns that span its own; zeros for redundant ones.

    XLA compiles each shape once: matrices of one shape are computed together.
    """
    by_shape: dict[tuple, list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(matrix.shape), []).append(i)
    found: dict[int, tf.Tensor] = {}
    for numbers in by_shape.values():
        batch = _orthogonal(tf.stack([matrices[i] for i in numbers]))
        found.update(zip(numbers, tf.unstack(batch), strict=True))
    return [found[i] for i in range(len(matrices))]


def _orthogonal(matrices: tf.Tensor) -> tf.Tensor:
    """Returns orthonormal columns of each matrix, `[matrices, rows, rank]`; see `orthogonal`.

    It is Gram-Schmidt, with each column orthogonalized twice: the ranks are small, and processes
    with the same sums get the same bits. The rest of a column that the others already span is
    rounding error, not a direction, so it is dropped. A loop, because XLA compiles it four times as
    fast as its unrolled steps, and what it compiles is not slower.
    """
    rank = matrices.shape[-1]
    columns = _unit(tf.transpose(matrices, [2, 0, 1]), axis=-1)

    def add_column(i, found):
        rest = columns[i]
        for _ in range(2):
            # Columns that are not found yet are zeros here.
            parts = tf.linalg.matvec(found, rest)
            rest -= tf.linalg.matvec(found, parts, transpose_a=True)
        length = tf.norm(rest, axis=-1, keepdims=True)
        column = tf.where(length < _REDUNDANT, tf.zeros_like(rest), rest / length)
        is_own = tf.reshape(tf.range(rank) == i, [1, rank, 1])
        return i + 1, tf.where(is_own, column[:, None], found)

    start = tf.zeros_like(tf.transpose(matrices, [0, 2, 1]))
    _, found = tf.while_loop(lambda i, _: i < rank, add_column, [tf.constant(0), start])
    return tf.transpose(found, [0, 2, 1])


def _unit(columns: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Returns vectors of norm 1, or zeros; scaled first, because tiny squares would vanish."""
    largest = tf.reduce_max(tf.abs(columns), axis, keepdims=True)
    scaled = tf.math.divide_no_nan(columns, largest)
    return tf.math.divide_no_nan(scaled, tf.norm(scaled, axis=axis, keepdims=True))


def _next_start(right: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Returns the next step's starting matrix, with vanished columns replaced by the last ones."""
    return tf.where(tf.reduce_any(right != 0, 0, keepdims=True), _unit(right), before)
